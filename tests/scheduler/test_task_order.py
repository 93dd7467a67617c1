"""The order of continuous task batching, said as a tuple and as a sum."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from rose_scheduler.task_order import Task, Weights, lexicographic

TASK = Task(False, 0.0, probed=True, open=True, active=True, context_tokens=100, group_order=5, asked_s=10.0)
SOONER = [
    replace(TASK, evaluation=True, active=False, context_tokens=1),
    replace(TASK, completion=0.25, active=False, context_tokens=1),
    replace(TASK, context_tokens=101, group_order=9),
    replace(TASK, group_order=4),
]
LATER = [
    replace(TASK, active=False),
    replace(TASK, active=False, probed=False, group_order=1),
    replace(TASK, active=False, open=False, group_order=0),
]


def test_what_comes_first_decides_unless_it_is_equal() -> None:
    ordered = [*SOONER, TASK, *LATER]
    assert sorted([*LATER, TASK, *SOONER], key=lexicographic) == ordered


def test_tasks_that_have_not_begun_are_not_told_apart_by_their_prompts() -> None:
    short, long = (replace(TASK, active=False, context_tokens=tokens) for tokens in (10, 90))
    assert lexicographic(short) == lexicographic(long)


def test_the_weights_of_the_largest_group_order_as_the_tuple_does() -> None:
    """A group of one beside a group of sixteen: with the weights of its own group it would not."""
    tasks = [
        Task(evaluation, over / size, True, True, active, context, order, 0.0)
        for evaluation, (over, size), active, context, order in product(
            (False, True), ((0, 1), (1, 16), (2, 16), (15, 16), (0, 16)), (False, True), (1, 500, 1000), (1, 2)
        )
        if active or context == 1
    ]
    weights = Weights.as_lexicographic(group_max=16, context_tokens_max=1000)
    assert sorted(tasks, key=weights) == sorted(tasks, key=lexicographic)


def test_with_a_weight_for_waiting_a_task_overtakes_in_time() -> None:
    weights = replace(Weights.as_lexicographic(4, 1000), waited=0.1)
    waited = replace(TASK, active=False, asked_s=0.0)
    came = [replace(TASK, asked_s=at_s) for at_s in (10.0, 30.0)]
    assert sorted([waited, *came], key=weights) == [came[0], waited, came[1]]


def test_weights_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Weights(-1.0, 0.0, 0.0, 0.0, 10)
    with pytest.raises(ValueError, match="0 or more"):
        Weights(1.0, 0.0, 0.0, float("nan"), 10)
    with pytest.raises(ValueError, match="has a token"):
        Weights.as_lexicographic(4, 0)
