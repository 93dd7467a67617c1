"""A daemon thread whose event loop makes the async calls of all episodes for another event loop.

Invariants
- The loop that waits never runs foreign code: one that spins or ignores its cancellation holds up the other async
  calls here, and neither the deadlines nor the signals there.
- Nothing here waits for the thread, nor for one that async code hands blocking work to: none holds up the process's
  exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rose.env.call import Answer, Pending, awaited, tell
from rose.env.daemon_threads import DaemonThreads


class AsyncThread:
    """Takes calls from the running event loop until `end`."""

    def __init__(self) -> None:
        self._waiter = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads("work of an async environment"))
        self._tasks: dict[Pending, asyncio.Task[Answer]] = {}
        self._open: set[Pending] = set()
        self._ended = False
        threading.Thread(target=self._work, name="async environments", daemon=True).start()

    @property
    def running(self) -> str:
        """The call that runs now, empty between two turns."""
        task = asyncio.current_task(self._loop)
        return "" if task is None else task.get_name()

    def has(self, pending: Pending) -> bool:
        """Whether a call is one of these, and under way."""
        return pending in self._open

    def turn(self) -> threading.Event:
        """Set as soon as the loop here has a turn for it, which it has not while a call does not await."""
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        return turn

    def submit(self, call: Callable[[], Awaitable[Any]], name: str) -> Pending:
        pending: Pending = self._waiter.create_future()
        self._open.add(pending)
        pending.add_done_callback(self._open.discard)
        self._loop.call_soon_threadsafe(self._begin, call, name, pending)
        return pending

    def give_up(self, pending: Pending) -> None:
        """Cancel a call; it is done when it has really ended. Nothing happens if it is none of these."""
        self._loop.call_soon_threadsafe(self._cancel, pending)

    def end(self) -> Pending:
        """Cancel whatever still runs; done when all of it has ended, which may be never."""
        pending: Pending = self._waiter.create_future()
        self._loop.call_soon_threadsafe(self._begin, self._wind_down, "end of async environments", pending)
        return pending

    def _begin(self, call: Callable[[], Awaitable[Any]], name: str, pending: Pending) -> None:
        task = self._tasks[pending] = self._loop.create_task(awaited(call), name=name)
        task.add_done_callback(partial(self._done, pending))

    def _cancel(self, pending: Pending) -> None:
        if pending in self._tasks:
            self._tasks[pending].cancel()

    def _done(self, pending: Pending, task: asyncio.Task[Answer]) -> None:
        del self._tasks[pending]
        # Cancelled before it began, it never got to turn that into an answer.
        tell(self._waiter, pending, (None, asyncio.CancelledError()) if task.cancelled() else task.result())

    async def _wind_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self._loop.shutdown_asyncgens()
        self._ended = True
        self._loop.call_soon(self._loop.stop)

    def _work(self) -> None:
        while not self._ended:
            # SystemExit of a task that an environment left running, or its own stop, ends no other environment.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        self._loop.close()
