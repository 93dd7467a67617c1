"""Episodes that are played in worker processes: what foreign code does to its process, it does not do to the run.

Invariants
- An opening costs one call, a step one, a close none that is waited for; calls share messages (`line`).
- An episode stays in the worker that opened it; a new one goes to the worker that has the fewest, of those that are fit
  if any is.
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
from rose.trainer.line import Line
from rose.trainer.rank import Rank
from rose.waits import WaitBoard

_keys = itertools.count()
_AT_ONCE = 4
"""Messages that a worker takes at once: one waits for answers, the others are short."""


class RemoteEpisodes:
    """The `Episodes` of `workers`, with the deadlines of an environment's own calls."""

    def __init__(self, workers: Sequence[EnvironmentWorker], *, reset_timeout_s: float, step_timeout_s: float) -> None:
        self.step_timeout_s = step_timeout_s
        self._workers = workers
        self._open_timeout_s = 2 * reset_timeout_s  # construction and reset

    async def open(self, seed: int, episode_id: str) -> RemoteEpisode:
        """Begin an episode of task `seed`. Raises EnvironmentFailed."""
        worker = min(self._workers, key=lambda one: (not one.fit, one.episodes))
        whom, key = f"environment {episode_id}", next(_keys)
        worker.episodes += 1
        line: Line | None = None
        try:
            line = await worker.ready(whom)
            texts = await worker.call(
                line, "open", key, seed, episode_id, what="reset", whom=whom, timeout_s=self._open_timeout_s
            )
        except BaseException:
            worker.episodes -= 1
            if line is not None:
                line.post("close", key)
            raise
        return RemoteEpisode(worker, line, key, whom, texts, self.step_timeout_s)


class RemoteEpisode:
    """One that has begun; `texts` are its system prompt and first observation."""

    def __init__(
        self,
        worker: EnvironmentWorker,
        line: Line,
        key: int,
        whom: str,
        texts: tuple[str, str],
        step_timeout_s: float,
    ) -> None:
        self.system_prompt, self.first_observation = texts
        self._worker = worker
        self._line = line
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
            self._line, "step", self._key, action, what="step", whom=self._whom, timeout_s=self._step_timeout_s
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
        if not self._over:
            self._line.post("close", self._key)


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
    workers = [
        EnvironmentWorker(
            name,
            partial(Rank, ray, name, waits, logs=logs, at_once=_AT_ONCE),
            config,
            waits,
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
