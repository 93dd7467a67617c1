"""What a step costs: a line learnt from steps, careful where little is known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.step_profile import StepProfile

STEPS = st.lists(st.tuples(st.integers(-5, 600), st.floats(allow_nan=True)), max_size=60)


def learnt(*steps: tuple[int, float]) -> StepProfile:
    profile = StepProfile()
    for tokens, seconds in steps:
        profile.saw(tokens, seconds)
    return profile


def line(tokens: int) -> float:
    return 0.004 + 0.0002 * tokens


def test_a_line_is_learnt_through_noise() -> None:
    noise = random.Random(1)
    profile = learnt(*((tokens, line(tokens) * noise.uniform(0.9, 1.1)) for tokens in [1, 8, 64, 16, 32] * 20))
    assert profile.seconds(40) == pytest.approx(line(40), rel=0.1)
    assert profile.tokens_within(line(40), 512) == pytest.approx(40, abs=8)


def test_an_engine_that_became_slower_is_followed() -> None:
    before = [(tokens, line(tokens)) for tokens in [1, 64] * 100]
    after = [(tokens, 3 * line(tokens)) for tokens in [1, 64] * 100]
    assert learnt(*before, *after).seconds(64) == pytest.approx(3 * line(64), rel=0.1)


def test_with_one_size_seen_larger_steps_cost_in_proportion_and_smaller_ones_the_same() -> None:
    profile = learnt(*[(8, 0.01)] * 5)
    assert [profile.seconds(tokens) for tokens in (1, 8, 16, 80)] == pytest.approx([0.01, 0.01, 0.02, 0.1])
    assert profile.tokens_within(0.021, 512) == 16
    assert profile.tokens_within(0.009, 512) == 0


def test_larger_steps_that_happened_to_cost_less_do_not_make_tokens_free_of_charge() -> None:
    profile = learnt(*[(1, 0.02), (64, 0.01)] * 10)
    assert profile.seconds(1) == profile.seconds(64) == pytest.approx(0.015, rel=0.05)
    assert profile.tokens_within(0.001, 512) == 0


def test_before_any_step_a_few_tokens_may_be_tried() -> None:
    assert StepProfile().tokens_within(0.001, 512) == 8
    assert StepProfile().tokens_within(0.001, 4) == 4
    assert StepProfile().tokens_within(0.0, 512) == 0


@given(STEPS, st.floats(-1, 10), st.integers(1, 600))
def test_what_is_admitted_fits_and_is_the_most_that_does(
    steps: list[tuple[int, float]], budget_s: float, tokens_max: int
) -> None:
    """Whatever was seen, absurd steps included."""
    profile = learnt(*((tokens, seconds) for tokens, seconds in steps if not seconds > 1e6))
    admitted = profile.tokens_within(budget_s, tokens_max)
    assert 0 <= admitted <= tokens_max
    seen = any(tokens > 0 and 0 < seconds <= 1e6 for tokens, seconds in steps)
    if admitted and seen:
        assert profile.seconds(admitted) <= budget_s
    if admitted < tokens_max and budget_s > 0 and seen:
        assert profile.seconds(admitted + 1) > budget_s
    costs = [profile.seconds(tokens) for tokens in range(1, 600)]
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs)
    assert all(more >= less - 1e-9 * more for less, more in itertools.pairwise(costs))
