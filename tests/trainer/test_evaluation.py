"""Evaluation: every score under one version, the same tasks every time, a few transcripts kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rose.config import EvaluationConfig
from rose.errors import ContractError, EnvironmentFailed
from rose.records import Finish, Outcome, Purpose, Trajectory, Turn, VersionSpan
from rose.trainer.evaluation import SAMPLES, Evaluator
from rose.trainer.rollout import Task


def a_turn(*versions: int) -> Turn:
    spans = tuple(VersionSpan(version, index, index + 1) for index, version in enumerate(versions))
    return Turn((1,), (5,) * len(versions), (-0.1,) * len(versions), spans, Finish.STOP)


class ScriptedRollout:
    """Plays tasks into trajectories of one turn, changed by `changes`."""

    def __init__(self, versions: tuple[int, ...] = (3,), **changes: Any) -> None:
        self._turn = a_turn(*versions)
        self._changes = changes
        self.played: list[list[Task]] = []
        self.taken: list[str] = []

    async def run(self, tasks: list[Task]) -> list[Trajectory]:
        self.played.append(tasks)
        return [
            replace(
                Trajectory(
                    task.trajectory_id,
                    task.group_id,
                    task.seed,
                    task.purpose,
                    (self._turn, self._turn),
                    float(index % 2),
                    index % 2 == 0,
                    Outcome.COMPLETED,
                    malformed_actions=1,
                ),
                **self._changes,
            )
            for index, task in enumerate(tasks)
        ]

    def take_messages(self, trajectory_id: str) -> tuple[dict[str, str], ...]:
        self.taken.append(trajectory_id)
        return ({"role": "user", "content": trajectory_id},)


def evaluator(rollout: ScriptedRollout) -> Evaluator:
    return Evaluator(rollout, EvaluationConfig(episodes=8, first_seed=100))  # type: ignore[arg-type]


def test_scores_are_of_one_version_and_samples_are_kept_when_asked() -> None:
    rollout = ScriptedRollout()
    evaluation, samples, played = asyncio.run(evaluator(rollout).evaluate(6, 3, "before"))
    assert (evaluation.step, evaluation.version, evaluation.episodes) == (6, 3, 8)
    assert (evaluation.success, evaluation.reward_mean) == (0.5, 0.5)
    assert (evaluation.malformed_fraction, evaluation.turns_mean) == (0.5, 2.0)
    assert [sample.task_seed for sample in samples] == [100, 101, 102, 103]
    assert samples[0].transcript[0].text == played[0].trajectory_id


def test_the_same_held_out_tasks_are_played_every_time_and_none_is_for_training() -> None:
    rollout = ScriptedRollout()
    for step in (0, 5):
        asyncio.run(evaluator(rollout).evaluate(step, 3, None))
    first, second = rollout.played
    assert [task.seed for task in first] == [task.seed for task in second] == list(range(100, 108))
    assert {task.purpose for task in first + second} == {Purpose.EVALUATION}
    assert not {task.trajectory_id for task in first} & {task.trajectory_id for task in second}
    assert [task.keep_messages for task in first].count(True) == SAMPLES


def test_messages_are_let_go_also_when_no_samples_are_wanted() -> None:
    rollout = ScriptedRollout()
    _, samples, _ = asyncio.run(evaluator(rollout).evaluate(1, 3, None))
    assert samples == []
    assert rollout.taken == [f"e1-{index}" for index in range(SAMPLES)]


@pytest.mark.parametrize("versions", [(2,), (4,), (3, 4)])
def test_a_token_of_another_version_is_a_broken_promise(versions: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="was sampled under"):
        asyncio.run(evaluator(ScriptedRollout(versions)).evaluate(1, 3, None))


def test_an_evaluation_that_cannot_score_a_single_episode_has_no_score() -> None:
    rollout = ScriptedRollout(
        turns=(), outcome=Outcome.ENVIRONMENT_FAILED, success=False, reward=0.0, malformed_actions=0
    )
    with pytest.raises(EnvironmentFailed, match="not one of"):
        asyncio.run(evaluator(rollout).evaluate(1, 3, None))


def test_episodes_without_a_single_turn_divide_by_nothing() -> None:
    rollout = ScriptedRollout(turns=(), outcome=Outcome.TRUNCATED, success=False, reward=0.0, malformed_actions=0)
    evaluation, _, _ = asyncio.run(evaluator(rollout).evaluate(1, 3, None))
    assert (evaluation.success, evaluation.malformed_fraction, evaluation.turns_mean) == (0.0, 0.0, 0.0)


def test_episodes_that_their_environment_failed_are_counted_and_in_no_figure() -> None:
    class HalfBroken(ScriptedRollout):
        async def run(self, tasks: list[Task]) -> list[Trajectory]:
            played = await super().run(tasks)
            broken = {"outcome": Outcome.ENVIRONMENT_FAILED, "success": False, "turns": ()}
            return [replace(each, **broken) if index % 2 else each for index, each in enumerate(played)]

    evaluation, _, _ = asyncio.run(evaluator(HalfBroken()).evaluate(1, 3, None))
    assert evaluation.success == 1.0
    assert evaluation.episodes == evaluation.failed > 0
