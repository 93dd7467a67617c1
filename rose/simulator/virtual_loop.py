"""An event loop on virtual time: it jumps to the next timer, and never sleeps.

Invariants
- Time stands still as long as a thread works for the loop or a callback is ready: how fast a machine is decides
  nothing. Whoever sleeps wakes when all that was begun before has come to rest.
- Threads that are given up count until they end.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_THREADS = 4


class VirtualLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=VirtualLoop)`. Its time begins at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._working = 0
        super().__init__(_Jumping(self))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rose-virtual")
        self.set_default_executor(self._threads)

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        self._working += 1
        begun = (executor or self._threads).submit(func, *args)
        told = asyncio.wrap_future(begun, loop=self)
        # The end of the thread counts, not that of who waits for it and may give up; who waits is told before.
        begun.add_done_callback(self._ended)
        return told

    def is_working(self) -> bool:
        return self._working > 0

    def jump(self, by_s: float) -> None:
        self._now_s += by_s

    def _ended(self, _: Future[Any]) -> None:
        if not self.is_closed():
            self.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self._working -= 1


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self._loop.is_working():
            return super().select(None)
        self._loop.jump(timeout)
        return super().select(0)
