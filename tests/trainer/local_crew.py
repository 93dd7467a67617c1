"""A crew in the test's own process: the real actor, reference and environments, on threads. Not a test module."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from rose.config import Job
from rose.env.contract import load_environment
from rose.env.host import EnvironmentHost, HostSettings
from rose.records import Group, Trajectory
from rose.trainer.actor_rank import ActorRank
from rose.trainer.crew import Crew
from rose.trainer.policy import Weights
from rose.trainer.recorder import Recorder
from rose.trainer.reference_rank import ReferenceRank
from rose.trainer.update_stats import UpdateStats
from rose.waits import WaitBoard
from rose_transfer.distribution.known_answer import KnownAnswer


class LocalActor:
    def __init__(self, rank: ActorRank) -> None:
        self.rank = rank

    async def update(self, groups: Sequence[Group]) -> UpdateStats:
        return await asyncio.to_thread(self.rank.update, groups)

    async def weights(self) -> Weights:
        return self.rank.weights()

    async def answer(self) -> KnownAnswer:
        return self.rank.answer()


class LocalReference:
    def __init__(self, rank: ReferenceRank) -> None:
        self._rank = rank

    async def divergence(self, trajectories: Sequence[Trajectory]) -> float:
        return await asyncio.to_thread(self._rank.divergence, trajectories)


async def at_any_rate(work: Coroutine[Any, Any, None], /) -> None:
    """There is no Ray here that could die."""
    await work


@contextlib.asynccontextmanager
async def open_local_crew(job: Job, recorder: Recorder, waits: WaitBoard) -> AsyncIterator[Crew]:
    environment = job.environment
    settings = HostSettings(environment.reset_timeout_s, environment.step_timeout_s)
    host = EnvironmentHost(load_environment(environment.kind, environment.params), waits, settings)
    try:
        yield Crew(LocalActor(ActorRank(job)), LocalReference(ReferenceRank(job)), host, at_any_rate)
    finally:
        await host.close()
