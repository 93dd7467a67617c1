"""What a client's session is told and what it asks for; see `client_session`.

Each connection is a *link* with a number of its own, so that news of one that is gone can be told from news of its
successor. An *ask* is one fetch, watch or search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rose.driver.core import After
from rose.errors import TransferError
from rose_transfer.transport.frames import Frame
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.messages import Message
from rose_transfer.transport.mismatch import Mismatch


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """`size_bytes` is None if the landing takes any size."""

    ask: int
    key: str
    resume_from: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class WatchAsked:
    ask: int
    at_least: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class LocateAsked:
    ask: int
    key: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for this ask any more."""

    ask: int


@dataclass(frozen=True, slots=True)
class Connected:
    link: int


@dataclass(frozen=True, slots=True)
class Arrived:
    link: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Heard:
    """Part of a long frame came."""

    link: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The link could not be made, was cut, or carried what is no frame; `mismatch` if the two ends do not fit."""

    link: int
    why: str
    mismatch: Mismatch | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """A rest is over; what was rested for since then, by a higher number, counts alone."""

    rest: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


ClientEvent: TypeAlias = (
    FetchAsked | WatchAsked | LocateAsked | Cancelled | Connected | Arrived | Heard | Lost | Retry | Tick
)


@dataclass(frozen=True, slots=True)
class Connect:
    """Open link number `link`; say Connected or Lost."""

    link: int


@dataclass(frozen=True, slots=True)
class Send:
    link: int
    message: Message


@dataclass(frozen=True, slots=True)
class Drop:
    """Cut the link. It is forgotten; nothing about it counts any more."""

    link: int
    why: str


@dataclass(frozen=True, slots=True)
class Grown:
    """The first `complete_bytes` of a fetch are in place."""

    ask: int
    complete_bytes: int


@dataclass(frozen=True, slots=True)
class Fetched:
    ask: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Told:
    """A watch has ended."""

    ask: int
    newest: Announcement | None


@dataclass(frozen=True, slots=True)
class Found:
    ask: int
    size_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Failed:
    ask: int
    error: TransferError


@dataclass(frozen=True, slots=True)
class Misfits:
    """Who welcomed us before does not fit any more. It is waited for all the same; say so to people."""

    mismatch: Mismatch


ClientAction: TypeAlias = Connect | Send | Drop | Misfits | Grown | Fetched | Told | Found | Failed | After[ClientEvent]
