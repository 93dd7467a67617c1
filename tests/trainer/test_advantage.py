from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import a_group, a_trajectory

from rose.records import Group, Outcome
from rose.trainer.advantage import group_advantages


def test_the_advantage_is_the_reward_relative_to_the_groups() -> None:
    result = group_advantages([a_group(random.Random(1), [0.0, 0.0, 0.0, 1.0])])
    assert [advantage for _, advantage in result.trained] == pytest.approx(
        [-0.25 / 0.5001] * 3 + [0.75 / 0.5001], abs=1e-9
    )


def test_a_group_of_equal_rewards_is_set_aside_whole() -> None:
    draw = random.Random(1)
    dull, lively = a_group(draw, [-0.1, -0.1, -0.1], "dull"), a_group(draw, [0.0, 1.0], "lively")
    result = group_advantages([dull, lively])
    assert result.zero_variance == dull.trajectories
    assert tuple(trajectory for trajectory, _ in result.trained) == lively.trajectories


@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED, Outcome.ENVIRONMENT_FAILED, Outcome.ABORTED])
def test_what_did_not_complete_is_neither_trained_nor_baseline(outcome: Outcome) -> None:
    draw = random.Random(1)
    good = a_group(draw, [0.0, 1.0]).trajectories
    failed = a_trajectory(draw, 100.0, outcome=outcome)
    result = group_advantages([Group("g", (*good, failed))])
    assert result.left_out == (failed,)
    assert sum(advantage for _, advantage in result.trained) == pytest.approx(0.0, abs=1e-9)


def test_one_completed_attempt_has_nothing_to_be_compared_with() -> None:
    draw = random.Random(1)
    alone = a_trajectory(draw, 1.0)
    empty = a_trajectory(draw, 0.0, turns=())
    result = group_advantages([Group("g", (alone, empty))])
    assert (result.trained, result.zero_variance, result.left_out) == ((), (alone,), (empty,))


rewards = st.lists(st.floats(-2, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(rewards, st.integers(0, 7)), max_size=5))
def test_every_trajectory_lands_in_exactly_one_list(groups: list[tuple[list[float], int]]) -> None:
    draw = random.Random(0)
    made = []
    for number, (values, failing) in enumerate(groups):
        members = tuple(
            a_trajectory(
                draw,
                value,
                outcome=Outcome.ABORTED if index == failing else Outcome.COMPLETED,
                name=f"{number}-{index}",
            )
            for index, value in enumerate(values)
        )
        made.append(Group(str(number), members))
    result = group_advantages(made)
    landed = [*(t for t, _ in result.trained), *result.zero_variance, *result.left_out]
    given_ = [t for group in made for t in group.trajectories]
    assert sorted(t.trajectory_id for t in landed) == sorted(t.trajectory_id for t in given_)
