"""Attempts at a version that cannot be had yet: the pauses between them, and what the log says.

Invariants
- Each pause is twice as long as the one before, up to `_PAUSE_S_MAX`; with another version they begin anew.
- A pause ends as soon as another version is offered.
- The log has each reason once for a version, however often it is tried.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from rose.errors import DeadlineExceeded, TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.subscription import log
from rose_transfer.store import NoRoom

_PAUSE_S = 1.0
_PAUSE_S_MAX = 64.0


class News(Protocol):
    async def next(self, after: Offer | None) -> Offer | None:
        """See `Subscription`."""
        ...


class Attempts:
    """Of one who follows what `news` says."""

    def __init__(self, news: News, waits: WaitBoard) -> None:
        self._news = news
        self._waits = waits
        self._failing: Offer | None = None
        self._pause_s = _PAUSE_S
        self._told: set[str] = set()

    def succeeded(self) -> None:
        """What fails next begins with the shortest pause, and is told of."""
        self._failing = None

    async def pause(self, failed: Offer, why: TransferError | DeadlineExceeded) -> None:
        """Return when it is time for another attempt, at this version or at another one.

        Raises Refused, or TransferError if the client was closed.
        """
        if failed != self._failing:
            self._failing, self._pause_s, self._told = failed, _PAUSE_S, set()
        # How many bytes are free is another number each time.
        reason = "no room" if isinstance(why, NoRoom) else str(why)
        if reason not in self._told:
            log.warning("a version cannot be had yet; it is tried on", version=failed.version, why=str(why))
        self._told.add(reason)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _PAUSE_S_MAX)
        with contextlib.suppress(DeadlineExceeded):
            await self._waits.within(
                self._another(failed),
                f"another attempt at version {failed.version}",
                "the upstream",
                pause_s,
                boundary="transfer",
            )

    async def _another(self, failed: Offer) -> None:
        while await self._news.next(failed) is None:
            pass
