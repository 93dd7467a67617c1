"""Runs a core in real time: receive, step, perform. It decides nothing.

Invariants
- The core is stepped by one task, one event at a time, in the order of arrival.
- Actions start in the order the core gave them and run side by side; a slow one holds up nobody.
- What the core or an action raises ends the driver and comes out of `run`. Nothing is swallowed.
- When `run` returns or raises, no task of the driver is left, unless one refused to be cancelled: then it says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Generic, TypeVar

from rose.driver.core import After, Core
from rose.errors import ContractError, DeadlineExceeded
from rose.waits import WaitBoard

E = TypeVar("E")
A = TypeVar("A")


class RealDriver(Generic[E, A]):
    """Feeds one core from a bounded queue and performs what it asks for.

    `perform` does one action and returns the events that came of it, which are fed back in order. It sets
    its own deadlines. `name` is who is waited on in `waits`. A driver runs once.
    """

    def __init__(
        self,
        core: Core[E, A | After[E]],
        perform: Callable[[A], Awaitable[Sequence[E]]],
        *,
        name: str,
        waits: WaitBoard,
        queue_limit: int = 1024,
        send_timeout_s: float = 10.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self._core = core
        self._perform = perform
        self._name = name
        self._waits = waits
        self._send_timeout_s = send_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._events: asyncio.Queue[E] = asyncio.Queue(queue_limit)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._failure: BaseException | None = None

    async def send(self, event: E) -> None:
        """Queue an event, waiting for room if the core is behind.

        Raises ContractError once the driver is over, with its failure as the cause, and DeadlineExceeded if
        there was no room in time.
        """
        if self._over.is_set():
            raise ContractError(f"{self._name} is over and takes no event") from self._failure
        if self._events.full():
            put = self._events.put(event)
            await self._waits.within(put, "room in its queue", self._name, self._send_timeout_s, boundary="rose")
        else:
            self._events.put_nowait(event)

    async def run(self) -> None:
        """Step until `stop`, then cancel whatever still runs.

        Raises what the core or an action raised first (later ones as notes on it), and DeadlineExceeded if
        an action did not end when it was cancelled.
        """
        self._spawn(self._step_events(), "steps")
        try:
            await self._over.wait()
        finally:
            self._over.set()
            await self._end_tasks()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let `run` return. Events still queued are not stepped, timers never fire, actions are cancelled."""
        self._over.set()

    async def _step_events(self) -> None:
        while True:
            event = await self._events.get()
            for action in self._core.step(event, time.monotonic()):
                if isinstance(action, After):
                    self._spawn(self._ring(action), "timer")
                else:
                    self._spawn(self._act(action), repr(action))

    async def _ring(self, timer: After[E]) -> None:
        await asyncio.sleep(timer.delay_s)
        await self._events.put(timer.event)

    async def _act(self, action: A) -> None:
        for event in await self._perform(action):
            await self._events.put(event)

    def _spawn(self, work: Coroutine[None, None, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"{self._name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure: BaseException | None = None
        if not task.cancelled():
            failure = task.exception()
        elif not self._over.is_set():
            # Before the end nobody here cancels; somebody else did, and the answer would be missing for ever.
            failure = ContractError(f"{task.get_name()} was cancelled from outside")
        if failure is None:
            return
        if self._failure is None:
            self._failure = failure
        else:
            self._failure.add_note(f"then {task.get_name()} raised {failure!r}")
        self._over.set()

    async def _end_tasks(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        with self._waits.waiting("end of its actions", self._name, self._stop_timeout_s):
            _, late = await asyncio.wait(tasks, timeout=self._stop_timeout_s)
        if late:
            names = ", ".join(sorted(task.get_name() for task in late))
            raise DeadlineExceeded(
                f"{names}: still running {self._stop_timeout_s:g} s after being cancelled", boundary="rose"
            ) from self._failure
