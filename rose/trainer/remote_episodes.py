"""Episodes that are played in worker processes: what foreign code does to its process, it does not do to the run.

Invariants
- A step costs one call, an opening one, a close none that is waited for.
- An episode stays in the worker that opened it; a new one goes to the worker that has the fewest.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rose.config import Job
from rose.env.contract import StepResult
from rose.errors import EnvironmentFailed
from rose.trainer.all_of import all_of
from rose.trainer.environment_worker import EnvironmentWorker
from rose.trainer.rank import Rank
from rose.waits import WaitBoard

_keys = itertools.count()
_BESIDES = 64
"""Calls that a worker takes beyond one for each episode: closes, its own end."""


class RemoteEpisodes:
    """The `Episodes` of `workers`, with the deadlines of an environment's own calls."""

    def __init__(self, workers: Sequence[EnvironmentWorker], *, reset_timeout_s: float, step_timeout_s: float) -> None:
        self.step_timeout_s = step_timeout_s
        self._workers = workers
        self._open_timeout_s = 2 * reset_timeout_s  # construction and reset

    async def open(self, seed: int, episode_id: str) -> RemoteEpisode:
        """Begin an episode of task `seed`. Raises EnvironmentFailed."""
        worker = min(self._workers, key=lambda one: one.episodes)
        whom, key = f"environment {episode_id}", next(_keys)
        worker.episodes += 1
        rank: Rank | None = None
        try:
            rank = await worker.ready(whom)
            texts = await worker.call(
                rank, "open", key, seed, episode_id, what="reset", whom=whom, timeout_s=self._open_timeout_s
            )
        except BaseException:
            worker.episodes -= 1
            if rank is not None and not rank.dead:
                rank.post("close", key)
            raise
        return RemoteEpisode(worker, rank, key, whom, texts, self.step_timeout_s)


class RemoteEpisode:
    """One that has begun; `texts` are its system prompt and first observation."""

    def __init__(
        self,
        worker: EnvironmentWorker,
        rank: Rank,
        key: int,
        whom: str,
        texts: tuple[str, str],
        step_timeout_s: float,
    ) -> None:
        self.system_prompt, self.first_observation = texts
        self._worker = worker
        self._rank = rank
        self._key = key
        self._whom = whom
        self._step_timeout_s = step_timeout_s
        self._over = False
        self._closed = False

    async def step(self, action: str) -> StepResult:
        """Act. Raises EnvironmentFailed."""
        if self._over or self._closed:
            raise EnvironmentFailed(f"{self._whom}: stepped after it was closed")
        answer = await self._worker.call(
            self._rank, "step", self._key, action, what="step", whom=self._whom, timeout_s=self._step_timeout_s
        )
        result = cast(StepResult, answer)
        self._over = result.over
        return result

    async def close(self) -> None:
        """Never raises, and does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        self._worker.episodes -= 1
        if not self._over and not self._rank.dead:
            self._rank.post("close", self._key)


@contextlib.asynccontextmanager
async def open_environments(
    ray: Any, job: Job, waits: WaitBoard, *, logs: Path, told: Callable[[str, str, str], None]
) -> AsyncIterator[RemoteEpisodes]:
    """Start the environment workers of a job in `ray`, which is running, and end them with the body.

    `logs` is the file that they log to; `told` hears the name of a worker, its state and a few words.
    Raises ConfigError if the environment cannot be loaded, ClusterError or DeadlineExceeded if a worker does not start.
    """
    config = job.environment
    names = [f"environment-{index}" for index in range(config.workers)]
    at_once = job.engine.max_num_seqs + _BESIDES
    workers = [
        EnvironmentWorker(
            name,
            partial(Rank, ray, name, waits, logs=logs, at_once=at_once),
            config,
            partial(told, name),
            job.train.start_timeout_s,
        )
        for name in names
    ]
    try:
        await all_of(*(worker.start() for worker in workers))
        yield RemoteEpisodes(workers, reset_timeout_s=config.reset_timeout_s, step_timeout_s=config.step_timeout_s)
    finally:
        await all_of(*(worker.end() for worker in workers))
