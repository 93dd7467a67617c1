"""A daemon thread that makes one episode's plain calls, in order, for an event loop.

Invariants
- Every submitted call is made, also those behind one that nobody waits for any more; then the thread ends.
- Nothing here waits for the thread, so a call that never returns cannot hold up the process's exit.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from rose.env.call import Pending, made, tell


class EpisodeThread:
    """Takes calls from the running event loop until `end`. `name` is the thread's."""

    def __init__(self, name: str) -> None:
        self._waiter = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Pending] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Pending:
        pending: Pending = self._waiter.create_future()
        self._calls.put((call, pending))
        return pending

    def end(self) -> None:
        """Let the thread end after the calls that were submitted so far."""
        self._calls.put(None)

    def _work(self) -> None:
        while (taken := self._calls.get()) is not None:
            call, pending = taken
            tell(self._waiter, pending, made(call))
