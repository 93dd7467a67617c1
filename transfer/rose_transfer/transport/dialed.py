"""One connection of a client: its link lives in a lane, its news go to the client's own loop.

Invariants
- A payload is placed only in a spot that was opened for its very request, object size, offset and length. A spot is
  used once.
- After `revoke` nothing is written any more to what was asked for under that number.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rose_transfer.transport.frames import FROM_SERVER, Frame, Header
from rose_transfer.transport.lanes import Lane
from rose_transfer.transport.link import Link
from rose_transfer.transport.mismatch import Mismatch


@dataclass(frozen=True, slots=True)
class Spot:
    """Room for one piece."""

    ask: int
    offset: int
    size_bytes: int
    room: memoryview


class DialedOwner(Protocol):
    """Told in its own loop."""

    def opened(self, dialed: Dialed) -> None: ...

    def arrived(self, dialed: Dialed, frame: Frame, placed: bool) -> None:
        """`placed` says that the payload is in its spot already."""
        ...

    def heard(self, dialed: Dialed) -> None: ...

    def ended(self, dialed: Dialed, why: str, mismatch: Mismatch | None = None) -> None: ...


class Dialed:
    """Made in the owner's loop. `dialing` is the attempt to connect, once there is one."""

    def __init__(self, number: int, lane: Lane, owner: DialedOwner) -> None:
        self.number = number
        self.lane = lane
        self.dialing: Future[None] | None = None
        self._owner = owner
        self._owner_loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self.given_up = False
        self._spots: dict[int, Spot] = {}
        self._landing: Spot | None = None

    # In the owner's loop

    def send(self, frame: Frame, spot: Spot | None) -> None:
        """Send a frame; the answer to it, if it is a piece, lands in `spot`."""
        if spot is not None:
            self._spots[frame.request] = spot
        self.lane.soon(lambda: self._link.send(frame) if self._link is not None else None)

    def cut(self) -> None:
        """End the connection, or the attempt at it. The owner still hears what was on its way."""
        self.given_up = True
        if self.dialing is not None:
            self.dialing.cancel()
        self.lane.soon(self._abort)

    def revoke(self, ask: int) -> bool:
        """Let nothing more land for `ask`. Returns whether that broke the connection."""
        landing = self._landing
        if not any(spot.ask == ask for spot in (*self._spots.copy().values(), *([landing] if landing else []))):
            return False
        broke: list[bool] = []
        self.lane.now(lambda: broke.append(self._revoke(ask)))
        return broke == [True]

    # In the lane

    def make_link(self) -> Link:
        self._link = Link(self, FROM_SERVER)
        if self.given_up:
            self._link.abort()
        return self._link

    def opened(self, link: Link) -> None:
        self._tell(partial(self._owner.opened, self))

    def arrived(self, link: Link, frame: Frame) -> None:
        placed, self._landing = self._landing is not None, None
        self._spots.pop(frame.request, None)
        self._tell(partial(self._owner.arrived, self, frame, placed))

    def heard(self, link: Link) -> None:
        self._tell(partial(self._owner.heard, self))

    def ended(self, link: Link, why: str, mismatch: Mismatch | None = None) -> None:
        self._tell(partial(self._owner.ended, self, why, mismatch))

    def place(self, link: Link, header: Header) -> memoryview | None:
        spot = self._spots.pop(header.request, None)
        if spot is None or (spot.offset, spot.size_bytes, len(spot.room)) != (
            header.offset,
            header.size,
            header.length,
        ):
            return None
        self._landing = spot
        return spot.room

    def _revoke(self, ask: int) -> bool:
        for request in [request for request, spot in self._spots.items() if spot.ask == ask]:
            del self._spots[request]
        broken = self._landing is not None and self._landing.ask == ask
        if broken:
            self._abort()
        return broken

    def _abort(self) -> None:
        self._spots.clear()
        self._landing = None
        if self._link is not None:
            self._link.abort()

    def _tell(self, news: partial[None]) -> None:
        try:
            self._owner_loop.call_soon_threadsafe(news)
        except RuntimeError:
            # The owner's loop was closed without closing the client: nobody is left to tell.
            self._abort()
