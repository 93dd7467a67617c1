"""Runs environments that may block, raise, hang or answer nonsense, and keeps each one's trouble to itself.

Invariants
- Every call has a deadline and a name on the wait board, and ends in a checked result or in EnvironmentFailed.
- Plain methods run on a daemon thread of the episode, from construction to close: they may block and keep what
  belongs to one thread (an SQLite connection). Async methods of all episodes run on one event loop on a daemon
  thread of its own, a task per call. Whatever either does, the host's own event loop and the process's exit go on.
- An async call that never awaits holds up the others on its thread. Whatever overruns behind it says so by its name.
- A call that overran its deadline is *stuck* until it ends by itself. Nobody waits for it, and while
  `max_stuck_calls` of them are left no new episode is opened.
- An environment is closed once, whatever happened to its episode; a failed close is counted and fails nobody.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rose.env.answer import checked_step, checked_text
from rose.env.async_thread import AsyncThread
from rose.env.call import Pending
from rose.env.contract import Environment, EnvironmentFactory, StepResult
from rose.env.episode_thread import EpisodeThread
from rose.errors import EnvironmentFailed
from rose.waits import WaitBoard

T = TypeVar("T")
_CLOSED = "was closed"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Deadlines of one call, and how many stuck calls are put up with before no new episode is opened.

    `reset_timeout_s` bounds construction and reset, each.
    """

    reset_timeout_s: float = 30.0
    step_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    max_stuck_calls: int = 16


@dataclass(slots=True)
class HostCounts:
    """Since the start: episodes opened, episodes failed, calls given up on, and closes that failed."""

    opened: int = 0
    failed: int = 0
    abandoned_calls: int = 0
    close_failures: int = 0


class EnvironmentHost:
    """Opens episodes of one kind of environment. Belongs to one event loop."""

    def __init__(self, make: EnvironmentFactory, board: WaitBoard, settings: HostSettings | None = None) -> None:
        self.make = make
        self.settings = settings or HostSettings()
        self.counts = HostCounts()
        self._board = board
        self._stuck: dict[Pending, str] = {}
        self._async_thread: AsyncThread | None = None
        self._late_turn: threading.Event | None = None

    @property
    def stuck(self) -> tuple[str, ...]:
        """Calls that overran and have not ended yet, by name, oldest first."""
        return tuple(self._stuck.values())

    async def open(self, seed: int, episode_id: str) -> Episode:
        """Construct and reset an environment.

        Raises EnvironmentFailed if it fails, or if too many earlier calls are stuck.
        """
        if len(self._stuck) >= self.settings.max_stuck_calls:
            raise EnvironmentFailed(
                f"no new episode while {len(self._stuck)} earlier calls are stuck, the oldest: {self.stuck[0]}"
                + self._held_up(self._late_turn),
                expected=f"calls that end within {self.settings.step_timeout_s:g} s",
                to_do="find out why the environment hangs, or raise its deadline",
            )
        self.counts.opened += 1
        episode = Episode(self, episode_id)
        try:
            await episode.begin(seed)
        except BaseException:
            await episode.close()
            raise
        return episode

    async def close(self) -> None:
        """Cancel what async environments left running; what ignores that is left behind after `close_timeout_s`.

        Call it once, when all episodes are closed.
        """
        if self._async_thread is None:
            return
        timeout_s = self.settings.close_timeout_s
        with self._board.waiting("end of their tasks", "async environments", timeout_s):
            await asyncio.wait([self._async_thread.end()], timeout=timeout_s)

    def start_async(self, call: Callable[[], Awaitable[Any]], name: str) -> Pending:
        """Begin a call of an async environment."""
        if self._async_thread is None:
            self._async_thread = AsyncThread()
        return self._async_thread.submit(call, name)

    async def answer(self, pending: Pending, what: str, whom: str, timeout_s: float) -> Any:
        """Wait for one call of an environment, by name; what it returned, unchecked.

        Raises EnvironmentFailed if it raised or overran.
        """
        turn: threading.Event | None = None
        try:
            with self._board.waiting(what, whom, timeout_s):
                await asyncio.wait([pending], timeout=timeout_s / 2)
                if self._async_thread is not None and self._async_thread.has(pending):
                    turn = self._async_thread.turn()
                await asyncio.wait([pending], timeout=timeout_s / 2)
        finally:
            if not pending.done():
                self._give_up_on(pending, f"{what} of {whom}")
        if not pending.done():
            self._late_turn = turn or self._late_turn
            raise EnvironmentFailed(f"{whom}: no {what} after {timeout_s:g} s{self._held_up(turn)}")
        value, error = pending.result()
        if error is not None:
            raise EnvironmentFailed(f"{whom}: its {what} raised {type(error).__name__}: {error}") from error
        return value

    def _give_up_on(self, pending: Pending, name: str) -> None:
        self.counts.abandoned_calls += 1
        self._stuck[pending] = name
        pending.add_done_callback(self._stuck.pop)
        if self._async_thread is not None:
            self._async_thread.give_up(pending)

    def _held_up(self, turn: threading.Event | None) -> str:
        """Who did not let a call have its turn in time, if it was asked for and somebody did not."""
        holder = self._async_thread.running if turn and self._async_thread and not turn.is_set() else ""
        return f"; {holder} does not await, and holds up all other async calls" if holder else ""


class Episode:
    """One running environment. Calls must not overlap; after a failure only `close` may follow.

    `steps` were asked for so far, and took `step_s` seconds together.
    """

    def __init__(self, host: EnvironmentHost, episode_id: str) -> None:
        self.episode_id = episode_id
        self.system_prompt = ""
        self.first_observation = ""
        self.steps = 0
        self.step_s = 0.0
        self._host = host
        self._whom = f"environment {episode_id}"
        self._thread = EpisodeThread(self._whom)
        self._environment: Environment | None = None
        self._last: Pending | None = None
        self._ended = ""

    async def begin(self, seed: int) -> None:
        """Construct and reset: sets the system prompt and the first observation. Raises EnvironmentFailed."""
        timeout_s = self._host.settings.reset_timeout_s
        self.system_prompt = await self._call("construction", timeout_s, self._construct, checked_text)
        environment = self._environment
        assert environment is not None
        reset = partial(environment.reset, seed, self.episode_id)
        self.first_observation = await self._call("reset", timeout_s, reset, checked_text)

    async def step(self, action: str) -> StepResult:
        """Act. Raises EnvironmentFailed if the environment does, or if it failed or was closed before."""
        if self._ended or self._environment is None:
            raise EnvironmentFailed(f"{self._whom}: stepped after it {self._ended}")
        self.steps += 1
        started_s = time.monotonic()
        try:
            act = partial(self._environment.step, action)
            return await self._call("step", self._host.settings.step_timeout_s, act, checked_step)
        finally:
            self.step_s += time.monotonic() - started_s

    async def close(self) -> None:
        """Close the environment; never raises, and does nothing the second time.

        One that hangs in a plain call is closed behind that call, without anybody waiting for it.
        """
        if self._ended == _CLOSED:
            return
        self._ended = _CLOSED
        hung = self._last is not None and not self._last.done()
        environment = self._environment
        if environment is not None and inspect.iscoroutinefunction(environment.close):
            pending, hung = self._start("close", environment.close), False
        else:
            pending = self._thread.submit(self._close)
        self._thread.end()
        if hung:
            return
        try:
            await self._host.answer(pending, "close", self._whom, self._host.settings.close_timeout_s)
        except EnvironmentFailed:
            self._host.counts.close_failures += 1

    async def _call(self, what: str, timeout_s: float, method: Callable[[], Any], check: Callable[[Any, str], T]) -> T:
        self._last = self._start(what, method)
        try:
            value = await self._host.answer(self._last, what, self._whom, timeout_s)
            return check(value, f"{self._whom}: its {what}")
        except EnvironmentFailed:
            self._ended = "failed"
            self._host.counts.failed += 1
            raise

    def _start(self, what: str, method: Callable[[], Any]) -> Pending:
        if inspect.iscoroutinefunction(method):
            return self._host.start_async(method, f"{what} of {self._whom}")
        return self._thread.submit(method)

    def _construct(self) -> Any:
        """On the thread; the system prompt. The environment is kept first: also a half-made episode is closed."""
        self._environment = self._host.make()
        return self._environment.system_prompt

    def _close(self) -> None:
        """On the thread, where a hung construction may have made the environment only now."""
        environment = self._environment
        if environment is not None and not inspect.iscoroutinefunction(environment.close):
            environment.close()
