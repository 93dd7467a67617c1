"""The training loop: roll out, update, publish, apply, prove, again.

Invariants
- One step makes one version. The rollout of a step is sampled under the version of the step before, whole.
- A version is proven by a fresh engine while the next step goes on; at most one proof is open, none is skipped.
- What the update took in is settled in the same step: trained or zero variance.
- A run whose engine or scheduler refuses everybody ends; so does one that for three steps brings no trajectory to its
  end.
- A version that turns most actions malformed ends the run with an alarm that names the last good version.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rose.config import Job
from rose.errors import EngineError, SchedulerError
from rose.ledger import Account
from rose.logs import logger
from rose.records import Group, Outcome, Purpose, Trajectory
from rose.report.model import Step
from rose.trainer.alarm import AlarmSettings, MalformedAlarm
from rose.trainer.all_of import all_of
from rose.trainer.books import Books
from rose.trainer.crew import Actor, Reference
from rose.trainer.engine_versions import Applied, EngineVersions, PublishedVersion
from rose.trainer.evaluation import Evaluator
from rose.trainer.parity import ParityCheck
from rose.trainer.policy import Weights, changed_fraction
from rose.trainer.recorder import Recorder
from rose.trainer.rollout import Rollout, Task, why_none_completed
from rose.trainer.update_stats import UpdateStats

log = logger("trainer")

APPLY_TIMEOUT_S = 120.0
BARREN_STEPS_MAX = 3
"""Steps in a row without one completed trajectory, after which a run ends."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives."""

    actor: Actor
    reference: Reference
    rollout: Rollout
    evaluator: Evaluator
    engine_versions: EngineVersions
    parity: ParityCheck
    books: Books
    recorder: Recorder
    engine_id: str


@dataclass(frozen=True, slots=True)
class _Sampled:
    trajectories: list[Trajectory]
    wall_s: float


class TrainingLoop:
    """Runs the steps of a job on parts that are already up."""

    def __init__(self, job: Job, parts: Parts) -> None:
        self._job = job
        self._parts = parts
        self._alarm = MalformedAlarm(AlarmSettings(limit=job.alarm.malformed_max))
        self._barren_steps = 0
        self._published: Weights = {}

    async def run(self) -> None:
        """Evaluate, train all steps, evaluate.

        Raises TrainingError (alarm, or not finite), ContractError (parity), EngineError or EnvironmentFailed (nothing
        comes to its end), ClusterError (a rank is lost), or what a part raised.
        """
        self._published = await self._parts.actor.weights()
        steps = self._job.train.steps
        await self._prove(0)
        await self._evaluate(0, "before")
        for step in range(1, steps + 1):
            await self._step(step)
            every = self._job.evaluation.every_steps
            if every and step % every == 0 and step < steps:
                await self._evaluate(step, None)
        await self._parts.parity.finish()
        await self._evaluate(steps, "after")

    async def _step(self, step: int) -> None:
        sampled = await self._roll_out(step)
        self._watch_actions(step - 1, sampled.trajectories)
        stats, reference_kl, train_s = await self._train(sampled.trajectories)
        _tell(step, stats)
        weights = await self._parts.actor.weights()
        changed = changed_fraction(self._published, weights)
        self._published = weights
        published, publish_s = await self._publish(step, weights)
        applied = await self._apply(step)
        self._record(step, sampled, stats, reference_kl, train_s, changed, published, publish_s, applied)
        await self._prove(step)

    async def _roll_out(self, step: int) -> _Sampled:
        rollout = self._job.rollout
        first_seed = self._job.run.seed * 1_000_003 + (step - 1) * rollout.groups
        tasks = [
            Task(
                f"s{step}g{group}-{attempt}",
                f"s{step}g{group}",
                (first_seed + group) % self._job.evaluation.first_seed,
                Purpose.TRAIN,
                min_version=step - 1,
                group_size=rollout.group_size,
            )
            for group in range(rollout.groups)
            for attempt in range(rollout.group_size)
        ]
        start_s = time.monotonic()
        with self._parts.recorder.during("rollout"):
            trajectories = await self._parts.rollout.run(tasks)
        self._parts.recorder.trajectories(trajectories)
        self._watch_completion(trajectories)
        return _Sampled(trajectories, time.monotonic() - start_s)

    def _watch_completion(self, trajectories: Sequence[Trajectory]) -> None:
        """A task's backend may be down for a while; an engine or scheduler that refuses everybody, or a task that never
        works, ends the run.
        """
        why = why_none_completed(trajectories)
        self._barren_steps = 0 if why is None else self._barren_steps + 1
        if why is not None and (
            isinstance(why, EngineError | SchedulerError) or self._barren_steps >= BARREN_STEPS_MAX
        ):
            raise why

    def _watch_actions(self, version: int, trajectories: Sequence[Trajectory]) -> None:
        actions = sum(len(trajectory.turns) for trajectory in trajectories)
        malformed = sum(trajectory.malformed_actions for trajectory in trajectories)
        alarm = self._alarm.step(version, actions, malformed)
        if alarm is not None:
            error = alarm.error()
            self._parts.recorder.alarm(version, error.what)
            raise error

    async def _train(self, trajectories: Sequence[Trajectory]) -> tuple[UpdateStats, float, float]:
        """The update, how far its trajectories' policy was from the reference, and how many seconds both took."""
        groups = [
            Group(group_id, tuple(members))
            for group_id, members in groupby(trajectories, key=lambda each: each.group_id)
        ]
        parts, start_s = self._parts, time.monotonic()
        with parts.recorder.during("train"):
            stats, reference_kl = await all_of(parts.actor.update(groups), parts.reference.divergence(trajectories))
        for trajectory in stats.trained:
            parts.books.settle(trajectory.trajectory_id, Account.TRAINED)
        for trajectory in stats.zero_variance:
            parts.books.settle(trajectory.trajectory_id, Account.ZERO_VARIANCE)
        for trajectory in stats.left_out:
            if trajectory.outcome is Outcome.COMPLETED:  # Nothing sampled: there is nothing to lose.
                parts.books.settle(trajectory.trajectory_id, Account.TRUNCATED)
        return stats, reference_kl, time.monotonic() - start_s

    async def _publish(self, version: int, weights: Weights) -> tuple[PublishedVersion, float]:
        start_s = time.monotonic()
        with self._parts.recorder.during("publish"):
            answer = await self._parts.actor.answer()
            published = await self._parts.engine_versions.publish(version, weights, answer)
        self._parts.recorder.published(version)
        return published, time.monotonic() - start_s

    async def _apply(self, version: int) -> Applied:
        parts = self._parts
        with parts.recorder.during("apply"):
            applied = await parts.engine_versions.applied(parts.engine_id, version, APPLY_TIMEOUT_S)
        parts.recorder.applied(parts.engine_id, version, applied.apply_s, applied.pause_ms)
        return applied

    async def _prove(self, version: int) -> None:
        every = self._job.weights.parity_every_steps
        if every and version % every == 0:
            await self._parts.parity.start(version)

    async def _evaluate(self, step: int, when: Literal["before", "after"] | None) -> None:
        parts = self._parts
        with parts.recorder.during("evaluation"):
            evaluation, samples, played = await parts.evaluator.evaluate(step, step, when)
        parts.recorder.trajectories(played)
        parts.recorder.samples(samples)
        parts.recorder.evaluation(evaluation)
        self._watch_actions(step, played)

    def _record(
        self,
        step: int,
        sampled: _Sampled,
        stats: UpdateStats,
        reference_kl: float,
        train_s: float,
        changed: float,
        published: PublishedVersion,
        publish_s: float,
        applied: Applied,
    ) -> None:
        trajectories = sampled.trajectories
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        self._parts.recorder.step(
            Step(
                step=step,
                version=step,
                success=sum(each.success for each in trajectories) / len(trajectories),
                reward_mean=sum(each.reward for each in trajectories) / len(trajectories),
                turns_mean=len(turns) / len(trajectories),
                malformed_fraction=sum(each.malformed_actions for each in trajectories) / max(1, len(turns)),
                groups_used=len({trajectory.group_id for trajectory in stats.trained}),
                groups_zero_variance=len({trajectory.group_id for trajectory in stats.zero_variance}),
                outcomes={
                    outcome.value: sum(each.outcome is outcome for each in trajectories)
                    for outcome in Outcome
                    if any(each.outcome is outcome for each in trajectories)
                },
                output_tokens=sum(len(turn.output_ids) for turn in turns),
                context_tokens=sum(len(turn.context_ids) for turn in turns),
                trained_tokens=stats.tokens,
                rollout_s=sampled.wall_s,
                train_s=train_s,
                publish_s=publish_s,
                apply_s=applied.apply_s,
                pause_ms=applied.pause_ms,
                logprob_mismatch_max=stats.logprob_mismatch_max,
                loss=stats.loss,
                entropy=stats.entropy,
                grad_norm=stats.grad_norm,
                clip_fraction=stats.clip_fraction,
                kl=stats.kl,
                reference_kl=reference_kl,
                learning_rate=stats.learning_rate,
                changed_fraction=changed,
                update_bytes=published.update_bytes,
                model_bytes=published.model_bytes,
            )
        )


def _tell(version: int, stats: UpdateStats) -> None:
    """Log which trajectories the update of `version` took in, and which not: the end of each one's story."""
    taken = {"trained": stats.trained, "zero_variance": stats.zero_variance, "left_out": stats.left_out}
    log.info(
        "update",
        version=version,
        **{what: [trajectory.trajectory_id for trajectory in those] for what, those in taken.items()},
    )
