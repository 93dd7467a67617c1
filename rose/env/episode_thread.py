"""A daemon thread that makes one episode's plain calls, in order, for an event loop.

Invariants
- Every submitted call is made, also those behind one that nobody waits for any more; then the thread ends.
- What a call raises comes back as data, whatever it is: an exception such as StopIteration or SystemExit must
  end neither a future's protocol nor the event loop.
- Nothing here waits for the thread, so a call that never returns cannot hold up the process's exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Answer = tuple[Any, BaseException | None]
"""What a call returned, or what it raised."""

Pending = asyncio.Future[Answer]


class EpisodeThread:
    """Takes calls from the running event loop until `end`. `name` is the thread's."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Pending] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Pending:
        pending: Pending = self._loop.create_future()
        self._calls.put((call, pending))
        return pending

    def end(self) -> None:
        """Let the thread end after the calls that were submitted so far."""
        self._calls.put(None)

    def _work(self) -> None:
        while (taken := self._calls.get()) is not None:
            call, pending = taken
            answer = _made(call)
            # A closed loop means that nobody is left to tell; the calls behind this one (close) still matter.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_tell, pending, answer)


def _made(call: Callable[[], Any]) -> Answer:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 -- foreign code: whatever it raises is its answer
        return None, error


def _tell(pending: Pending, answer: Answer) -> None:
    if not pending.done():
        pending.set_result(answer)


async def awaited(call: Callable[[], Awaitable[Any]]) -> Answer:
    """Make an async call under the same promise, on the event loop. Cancelling passes through."""
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 -- foreign code: whatever it raises is its answer
        return None, error
