"""Who trains and plays beside the engines: actor, reference and environment workers, each in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rose.config import Job
from rose.env.episodes import Episodes
from rose.records import Group, Trajectory
from rose.trainer.all_of import all_of
from rose.trainer.cluster import Cluster, local_cluster
from rose.trainer.policy import Weights
from rose.trainer.ranks import open_ranks
from rose.trainer.recorder import Recorder
from rose.trainer.remote_episodes import open_environments
from rose.trainer.update_stats import UpdateStats
from rose.waits import WaitBoard
from rose_transfer.distribution.known_answer import KnownAnswer


class Actor(Protocol):
    """The policy that is trained, wherever it lives."""

    async def update(self, groups: Sequence[Group]) -> UpdateStats:
        """One update on the groups. Raises TrainingError if it is not finite, ClusterError if the policy is lost."""
        ...

    async def weights(self) -> Weights:
        """All parameters, bfloat16."""
        ...

    async def answer(self) -> KnownAnswer:
        """What an engine with these weights must answer."""
        ...


class Reference(Protocol):
    """The policy that training began with."""

    async def divergence(self, trajectories: Sequence[Trajectory]) -> float:
        """KL(sampling || reference) in nats per sampled token; see `ReferenceRank`."""
        ...


class WhileAlive(Protocol):
    """Runs some work for as long as what the crew stands on is there; see `Cluster.while_alive`."""

    async def __call__(self, work: Coroutine[Any, Any, None], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Crew:
    """That of one run, ready."""

    actor: Actor
    reference: Reference
    episodes: Episodes
    while_alive: WhileAlive


OpenCrew = Callable[[Job, Recorder, WaitBoard], AbstractAsyncContextManager[Crew]]
"""Opens the crew of a job."""

OpenCluster = Callable[[Path, str, WaitBoard, float], AbstractAsyncContextManager[Cluster]]


@contextlib.asynccontextmanager
async def open_crew(
    job: Job, recorder: Recorder, waits: WaitBoard, open_cluster: OpenCluster = local_cluster
) -> AsyncIterator[Crew]:
    """Start Ray, then all ranks and workers side by side, and end them with the body.

    Raises ConfigError if the model folder or the environment cannot be loaded, ClusterError or DeadlineExceeded if a
    process does not start.
    """
    logs = recorder.run.output / "log.jsonl"
    recorder.part("Ray", "starting")
    run, start_timeout_s = recorder.run, job.train.start_timeout_s
    async with open_cluster(run.runtime, run.run_id, waits, start_timeout_s) as cluster:
        recorder.part("Ray", "ready")
        async with contextlib.AsyncExitStack() as stack:
            ranks = open_ranks(
                cluster.ray,
                job,
                waits,
                logs=logs,
                told=recorder.part,
                start_timeout_s=start_timeout_s,
                call_timeout_s=job.train.update_timeout_s,
            )
            environments = open_environments(cluster.ray, job, waits, logs=logs, told=recorder.part)
            trainers, episodes = await cluster.while_alive(
                all_of(stack.enter_async_context(ranks), stack.enter_async_context(environments))
            )
            yield Crew(trainers.actor, trainers.reference, episodes, cluster.while_alive)
    recorder.part("Ray", "ended")
