"""Held-out episodes under one frozen weight version.

Invariants
- Every score carries exactly one version: a token sampled under another one is a broken promise, not a data point.
- The same tasks are played at every evaluation, and none of them is ever trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from rose.config import EvaluationConfig
from rose.errors import ContractError
from rose.records import Outcome, Purpose, Trajectory
from rose.report.model import Evaluation, Message, Sample
from rose.trainer.rollout import Rollout, Task, why_none_completed

_SCORED = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED})
"""An agent that filled its context has failed at the task; one whose environment broke was not asked."""

SAMPLES = 4
"""Transcripts kept of each evaluation, of the same tasks every time."""


class Evaluator:
    """Plays the held-out tasks of a job."""

    def __init__(self, rollout: Rollout, config: EvaluationConfig) -> None:
        self._rollout = rollout
        self._config = config

    async def evaluate(
        self, step: int, version: int, when: Literal["before", "after"] | None
    ) -> tuple[Evaluation, list[Sample], list[Trajectory]]:
        """Score `version`; samples are kept if `when` says which ones they are.

        Episodes that their environment or engine failed are left out of the score and counted.
        Raises ContractError if anything was sampled under another version, EngineError or EnvironmentFailed if not a
        single episode can be scored.
        """
        start_s = time.monotonic()
        seeds = range(self._config.first_seed, self._config.first_seed + self._config.episodes)
        tasks = [
            Task(
                f"e{step}-{seed - seeds[0]}",
                f"e{step}",
                seed,
                Purpose.EVALUATION,
                version,
                len(seeds),
                keep_messages=index < SAMPLES,
            )
            for index, seed in enumerate(seeds)
        ]
        played = await self._rollout.run(tasks)
        _check_version(played, version)
        scored = [each for each in played if each.outcome in _SCORED]
        if not scored:
            why = why_none_completed(played)
            assert why is not None
            raise why
        actions = sum(len(each.turns) for each in scored)
        evaluation = Evaluation(
            step=step,
            version=version,
            episodes=len(scored),
            failed=len(played) - len(scored),
            success=sum(each.success for each in scored) / len(scored),
            reward_mean=sum(each.reward for each in scored) / len(scored),
            malformed_fraction=sum(each.malformed_actions for each in scored) / max(1, actions),
            turns_mean=actions / len(scored),
            wall_s=time.monotonic() - start_s,
        )
        return evaluation, self._samples(played, when), played

    def _samples(self, played: Sequence[Trajectory], when: Literal["before", "after"] | None) -> list[Sample]:
        samples = []
        for trajectory in played[:SAMPLES]:
            messages = self._rollout.take_messages(trajectory.trajectory_id)
            if when is not None:
                transcript = tuple(Message(role=message["role"], text=message["content"]) for message in messages)
                samples.append(
                    Sample(
                        when=when,
                        task_seed=trajectory.task_seed,
                        success=trajectory.success,
                        reward=trajectory.reward,
                        transcript=transcript,
                    )
                )
        return samples


def _check_version(played: Sequence[Trajectory], version: int) -> None:
    for trajectory in played:
        for turn in trajectory.turns:
            for span in turn.versions:
                if span.version != version:
                    raise ContractError(
                        f"evaluation of version {version}: {trajectory.trajectory_id} was sampled under {span.version}",
                        expected="one version for every score",
                    )
