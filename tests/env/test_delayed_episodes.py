"""Answers that come late: by any clock, seen while they are awaited, and cancelled without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from environment_zoo import QUIET, Plain

from rose.config import EnvironmentConfig
from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.env.contract import StepResult
from rose.env.delayed import DelayedEpisodes, delayed
from rose.env.host import EnvironmentHost
from rose.env.latency import PRESETS, Latency, LatencyPreset, LatencySampler
from rose.waits import Wait, WaitBoard

TOOL = PRESETS["tool"]


class NoCore:
    """A core that nothing is fed to."""

    def step(self, event: object, now: float) -> list[object]:
        raise AssertionError(event)


class VirtualClock:
    """The sleeps of a virtual driver; `run` lets them pass one after the other."""

    def __init__(self) -> None:
        self.driver: VirtualDriver[object, object] = VirtualDriver(
            NoCore(), lambda action: (), lambda: None, world="latency", seed=0, random=Random(0), faults=FaultPlan()
        )

    async def sleep(self, delay_s: float) -> None:
        passed = asyncio.get_running_loop().create_future()
        self.driver.call(delay_s, "a delay ends", lambda: None if passed.done() else passed.set_result(None))
        await passed


class Bench:
    """Delayed episodes of a well-behaved environment, on a virtual clock."""

    def __init__(self, board: WaitBoard, preset: LatencyPreset = TOOL, make: Callable[[], Plain] = Plain) -> None:
        self.clock = VirtualClock()
        self.sampler = LatencySampler(preset, seed=5)
        self.host = EnvironmentHost(make, board)
        self.episodes = DelayedEpisodes(self.host, self.sampler, board, self.clock.sleep)
        self.board = board

    async def begin_waiting(self) -> Wait:
        """The wait for a latency, once it is on the board."""
        async with asyncio.timeout(10):
            while not (found := [wait for wait in self.board.snapshot() if wait.what == "tool answer"]):
                await asyncio.sleep(0)
        return found[0]

    async def late(self, work: asyncio.Task[object], latency: Latency) -> None:
        """Nothing comes of `work` before the latency has passed on the virtual clock."""
        wait = await self.begin_waiting()
        assert wait.whom == "environment s1g0-0"
        assert wait.deadline_s - wait.since_s == pytest.approx(latency.seconds)
        until_s = self.clock.driver.now + latency.seconds
        self.clock.driver.run(until_s - 1e-6)
        await asyncio.sleep(0)
        assert not work.done()
        self.clock.driver.run(until_s)


def test_every_answer_is_as_late_as_drawn_on_a_virtual_clock(board: WaitBoard) -> None:
    async def run() -> None:
        bench = Bench(board)
        opening = asyncio.create_task(bench.episodes.open(3, "s1g0-0"))
        await bench.late(opening, bench.sampler.reset(3, "s1g0-0"))  # type: ignore[arg-type]
        episode = await opening
        assert (episode.first_observation, episode.system_prompt) == ("3/s1g0-0", "do")
        for turn in range(3):
            stepping = asyncio.create_task(episode.step("x"))
            await bench.late(stepping, bench.sampler.step(3, "s1g0-0", turn))  # type: ignore[arg-type]
            assert await stepping is QUIET
        await episode.close()
        assert board.snapshot() == ()

    asyncio.run(run())


def test_a_cancelled_delay_leaves_nothing_done(board: WaitBoard) -> None:
    made: list[Plain] = []

    class Kept(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0
            made.append(self)

        def step(self, action: str) -> StepResult:
            self.steps += 1
            return QUIET

    async def cancelled(bench: Bench, work: asyncio.Task[object]) -> None:
        await bench.begin_waiting()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert board.snapshot() == ()

    async def run() -> None:
        bench = Bench(board, make=Kept)
        await cancelled(bench, asyncio.create_task(bench.episodes.open(3, "a")))  # type: ignore[arg-type]
        assert (made, bench.host.counts.opened) == ([], 0)
        opening = asyncio.create_task(bench.episodes.open(3, "a"))
        await bench.begin_waiting()
        bench.clock.driver.run(TOOL.longest_s)
        episode = await opening
        await cancelled(bench, asyncio.create_task(episode.step("x")))  # type: ignore[arg-type]
        await episode.close()
        assert (made[0].steps, made[0].closed) == (0, 1)  # type: ignore[attr-defined]

    asyncio.run(run())


@pytest.mark.parametrize("own", [QUIET, StepResult("won", 1.0, True, False, success=True)])
def test_a_step_that_times_out_is_the_last_of_its_episode(board: WaitBoard, own: StepResult) -> None:
    class Ending(Plain):
        def step(self, action: str) -> StepResult:
            return own

    always_late = LatencyPreset(1.0, 0.5, 1e-6, 0.5, 0.5, 1.0, 8.0, longest_s=1e-3)

    async def run() -> StepResult:
        episodes = DelayedEpisodes(EnvironmentHost(Ending, board), LatencySampler(always_late, 0), board)
        episode = await episodes.open(3, "a")
        try:
            return await episode.step("x")
        finally:
            await episode.close()

    result = asyncio.run(run())
    assert result.over
    assert (result.truncated, result.terminated) == ((True, False) if own is QUIET else (False, True))
    assert (result.observation, result.reward) == (own.observation, own.reward)


def test_a_job_chooses_preset_scale_and_seed(board: WaitBoard) -> None:
    host = EnvironmentHost(Plain, board)
    assert delayed(host, EnvironmentConfig(kind="frozen_lake"), 5, board) is host
    job = EnvironmentConfig(kind="frozen_lake", latency="tool", latency_scale=0.25)
    late = delayed(host, job, 5, board)
    assert isinstance(late, DelayedEpisodes)
    assert late.sampler.step(3, "a", 0) == LatencySampler(TOOL, 5, 0.25).step(3, "a", 0)
