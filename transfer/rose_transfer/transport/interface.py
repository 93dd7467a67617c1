"""What every transport does: fetch an object by its key, and hear of the newest version without polling.

Invariants
- Objects are immutable: a key names the same bytes for ever. That is what makes a cut fetch resumable.
- Receivers pull. A server keeps nothing about a receiver but its open requests.
- A fetch returns only when every byte is in place and matched the checksum of the frame that brought it. Until
  then, and after an error, the landing holds nothing to rely on beyond its first `complete_bytes`.
- Whether the bytes are what the key promises is for whoever knows what a key means: the store hashes them.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rose.errors import ContractError, TransferError

# A key may become a file name, so it holds no separator and does not begin with a dot.
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")

MakeContext = Callable[[], ssl.SSLContext]
"""Asked for each connection, so that certificates may be renewed; see `rose.certificates`."""


class ObjectMissing(TransferError):
    """The server has no object of that key, or no longer."""


class Refused(TransferError):
    """The two sides do not fit: other tokens, TLS on one of them only, a certificate that is not accepted, another
    transport, or a service of another kind. To try again is of no use before somebody has changed that.
    """


def is_key(text: str) -> bool:
    """Whether `text` can name an object: 1 to 200 letters, digits, `-`, `_` and, not first, `.`."""
    return _KEY.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Announcement:
    """The newest version that a server offers, and a key that says more of it to those who know what keys mean."""

    version: int
    key: str

    def __post_init__(self) -> None:
        if not 0 <= self.version < 2**63 or not is_key(self.key):
            raise ContractError(f"{self.version} with key {self.key!r} is no announcement")


class ReadableObject(Protocol):
    """An object that can be read in any order."""

    @property
    def size_bytes(self) -> int: ...

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes from `offset`. Raises TransferError or OSError if they cannot be read."""
        ...

    def close(self) -> None:
        """No more reads follow; what was read stays."""
        ...


@runtime_checkable
class FileObject(Protocol):
    """An object that is a whole file by itself, which another process on the host may map."""

    @property
    def path(self) -> Path: ...


class ObjectSource(Protocol):
    """Where a server finds objects. Called from threads, several at once."""

    def has(self, key: str) -> bool: ...

    def open(self, key: str) -> ReadableObject:
        """Raises TransferError if there is none."""
        ...


@runtime_checkable
class PreparingSource(Protocol):
    """A source some of whose objects are made when they are asked for."""

    async def prepare(self, key: str) -> None:
        """Called in the server's loop before `has` and `open`. Raises RoseError if the object cannot be made."""
        ...


class Landing(Protocol):
    """Where a fetched object is put. See `landing` for memory and files."""

    complete_bytes: int

    def room(self, size_bytes: int) -> memoryview:
        """Writable room for the whole object, the same at every call.

        Raises TransferError if there is none: the wrong size, a full disk.
        """
        ...


class ObjectServer(Protocol):
    """Serves the objects of one source until closed."""

    async def start(self) -> None:
        """Raises ClusterError if the address cannot be bound."""
        ...

    def announce(self, newest: Announcement) -> None:
        """Tell every receiver that watches. Raises ContractError if the version does not rise."""
        ...

    async def close(self) -> None:
        """Cut every connection; receivers see a lost link and try again until their own deadline."""
        ...


class ObjectClient(Protocol):
    """Pulls objects from one server. Any number of fetches and watches may be under way."""

    async def fetch(
        self, key: str, into: Landing, *, size_bytes: int | None = None, resume_from: int = 0, deadline_s: float
    ) -> int:
        """Put the object in place and return its size in bytes.

        The first `resume_from` bytes are in place already. A `size_bytes` that is known saves a round trip. Lost
        links are mended and cost only the pieces that were under way. Raises ObjectMissing, Refused, TransferError
        (another size, unreadable, no room) or DeadlineExceeded after `deadline_s` seconds.
        """
        ...

    async def watch(self, at_least: int, *, deadline_s: float) -> Announcement | None:
        """The newest announcement, as soon as its version is `at_least` that; None if there was none in time.

        The server holds the question for most of `deadline_s`; in less than half a second it is asked only once.
        Raises Refused, or DeadlineExceeded if the server never answered.
        """
        ...

    async def close(self) -> None:
        """End every fetch and watch with TransferError."""
        ...
