"""Every wait has a deadline and a name, and `rose status` shows it.

A process keeps one `WaitBoard`. A wait is on the board from the moment it begins until it ends, whatever
ends it, so the board always answers: what is waiting, for whom, since when, until when.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rose.errors import DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """`what` is waited for, `whom` it is waited on; times are `time.time()` seconds."""

    what: str
    whom: str
    since_s: float
    deadline_s: float


class WaitBoard:
    """The waits that are open now. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._open: dict[int, Wait] = {}

    def snapshot(self) -> tuple[Wait, ...]:
        """Open waits, oldest first."""
        with self._lock:
            return tuple(sorted(self._open.values(), key=lambda wait: wait.since_s))

    @contextmanager
    def waiting(self, what: str, whom: str, timeout_s: float) -> Iterator[Wait]:
        """Show a wait while the body runs; the body enforces `timeout_s` itself."""
        now = time.time()
        wait = Wait(what, whom, now, now + timeout_s)
        key = next(self._ids)
        with self._lock:
            self._open[key] = wait
        try:
            yield wait
        finally:
            with self._lock:
                del self._open[key]

    async def within(
        self, awaitable: Awaitable[T], what: str, whom: str, timeout_s: float, *, boundary: str, to_do: str = ""
    ) -> T:
        """Await with a deadline and a name.

        Raises DeadlineExceeded, with the boundary of the party that did not answer.
        """
        with self.waiting(what, whom, timeout_s):
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return await awaitable
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise DeadlineExceeded(
                    f"{whom}: no {what} after {timeout_s:g} s", boundary=boundary, to_do=to_do
                ) from error
