"""The ranks of a run: an actor and a reference, each in a process of its own.

Invariants
- Ranks start side by side; where one cannot, none is left.
- Ranks are ended, not asked: what they hold is either published or lost with the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rose.config import Job
from rose.records import Group, Trajectory
from rose.trainer.actor_rank import ActorRank
from rose.trainer.all_of import all_of
from rose.trainer.policy import Weights
from rose.trainer.rank import Rank
from rose.trainer.reference_rank import ReferenceRank
from rose.trainer.update_stats import UpdateStats
from rose.waits import WaitBoard
from rose_transfer.distribution.known_answer import KnownAnswer

ACTOR, REFERENCE = "actor", "reference"


class RemoteActor:
    """An `ActorRank` in its process; raises ClusterError once that is gone, DeadlineExceeded where it is too slow."""

    def __init__(self, rank: Rank, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s

    async def update(self, groups: Sequence[Group]) -> UpdateStats:
        """See `ActorRank.update`."""
        return cast(UpdateStats, await self._rank.call("update", groups, what="update", timeout_s=self._timeout_s))

    async def weights(self) -> Weights:
        """See `ActorRank.weights`."""
        return cast(Weights, await self._rank.call("weights", what="weights", timeout_s=self._timeout_s))

    async def answer(self) -> KnownAnswer:
        """See `ActorRank.answer`."""
        return cast(KnownAnswer, await self._rank.call("answer", what="known answer", timeout_s=self._timeout_s))


class RemoteReference:
    """A `ReferenceRank` in its process; raises as `RemoteActor` does."""

    def __init__(self, rank: Rank, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s

    async def divergence(self, trajectories: Sequence[Trajectory]) -> float:
        """See `ReferenceRank.divergence`."""
        answer = await self._rank.call("divergence", trajectories, what="divergence", timeout_s=self._timeout_s)
        return float(answer)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Those of one run, ready."""

    actor: RemoteActor
    reference: RemoteReference


@contextlib.asynccontextmanager
async def open_ranks(
    ray: Any,
    job: Job,
    waits: WaitBoard,
    *,
    logs: Path,
    told: Callable[[str, str, str], None],
    start_timeout_s: float,
    call_timeout_s: float,
) -> AsyncIterator[Ranks]:
    """Start the ranks of a job in `ray`, which is running, and end them with the body.

    `logs` is the file that they log to; `told` hears the name of a part, its state and a few words.
    Raises ConfigError if the model folder cannot be loaded, ClusterError or DeadlineExceeded if a rank does not start.
    """
    made = {name: Rank(ray, name, waits, logs=logs) for name in (ACTOR, REFERENCE)}

    async def start(name: str, make: Callable[[Job], object]) -> None:
        told(name, "starting", "")
        pid = await made[name].start(make, job, timeout_s=start_timeout_s)
        told(name, "ready", f"process {pid}")

    try:
        await all_of(start(ACTOR, ActorRank), start(REFERENCE, ReferenceRank))
        yield Ranks(RemoteActor(made[ACTOR], call_timeout_s), RemoteReference(made[REFERENCE], call_timeout_s))
    finally:
        for name, rank in made.items():
            rank.kill()
            told(name, "ended", "")
