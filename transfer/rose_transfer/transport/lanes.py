"""Event loops in threads of their own, so that receiving and checking gigabytes holds up nobody's main loop.

Invariants
- A lane runs only short callbacks of links, never anything that waits. So whoever asks it to do something, and waits
  until it was done, waits for one receive at most.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from rose.errors import ContractError, DeadlineExceeded

_PATIENCE_S = 5.0


class Lane:
    """One loop in one thread, until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._name = name
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` in the lane, after what was asked for before."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(callback)

    def now(self, callback: Callable[[], object]) -> None:
        """Run `callback` in the lane and wait until it has returned.

        Raises DeadlineExceeded if the lane does not get to it, which is a bug.
        """
        done = threading.Event()

        def run() -> None:
            try:
                callback()
            finally:
                done.set()

        self.soon(run)
        if not done.wait(_PATIENCE_S):
            raise DeadlineExceeded(f"{self._name}: busy for {_PATIENCE_S:g} s", boundary="rose")

    def close(self) -> None:
        """End the thread. What its links had to say is not said any more."""
        self.soon(self.loop.stop)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            raise ContractError(f"{self._name} does not end")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()
