"""Ctrl-C for whatever runs on an event loop: asking cancels it, wherever it is, or tells it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stop:
    """From the moment signals are handled: cancels the work, or has it end as soon as it begins."""

    def __init__(self) -> None:
        self.asked = False
        self._cancel: Callable[[], None] | None = None

    def ask(self) -> None:
        """At any point of the main thread's work, as a signal's handler does."""
        self.asked = True
        if self._cancel is not None:
            self._cancel()

    async def cancels(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; asking, before or meanwhile, cancels it."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        if self.asked:
            cancel()
        try:
            return await work
        finally:
            # Too late to cancel anything: a signal from here on must find no loop that is closing or closed.
            self._cancel = None


def first_signal() -> asyncio.Future[signal.Signals]:
    """The first of SIGTERM and Ctrl-C, from now on: for a service, which ends in its own order. Main thread only."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()

    def ask(signum: signal.Signals) -> None:
        if not asked.done():
            asked.set_result(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ask, signum)
    return asked
