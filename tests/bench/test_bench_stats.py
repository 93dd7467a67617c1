"""Medians, spread, and the interval of a ratio."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import iqr, paired_ratio, quantile


def test_quantiles_are_those_of_type_seven() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [quantile(values, at) for at in (0, 0.25, 0.5, 0.75, 1)] == [1, 1.75, 2.5, 3.25, 4]
    assert iqr(values) == 1.5
    assert iqr([7.0]) == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_among_the_values(values: list[float], at: float) -> None:
    assert min(values) - 1e-6 <= quantile(values, at) <= max(values) + 1e-6


@pytest.mark.parametrize(("values", "at"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_quantile_of_nonsense(values: Sequence[float], at: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(values, at)


def test_pairing_cancels_what_both_sides_suffer() -> None:
    source = random.Random(3)
    theirs = [source.uniform(1, 100) for _ in range(20)]
    ours = [value * 0.8 * source.uniform(0.99, 1.01) for value in theirs]
    found = paired_ratio(ours, theirs)
    assert 0.79 < found.low <= found.ratio <= found.high < 0.81
    assert found.excludes_one


def test_no_difference_is_seldom_claimed() -> None:
    source = random.Random(5)
    claimed = 0
    for seed in range(100):
        ours, theirs = ([source.uniform(0.9, 1.1) for _ in range(9)] for _ in range(2))
        claimed += paired_ratio(ours, theirs, resamples=200, seed=seed).excludes_one
    assert claimed <= 15


def test_the_same_seed_gives_the_same_interval() -> None:
    ours, theirs = [1.0, 2.0, 3.0, 4.0, 5.0], [1.1, 2.3, 2.9, 4.2, 4.0]
    assert paired_ratio(ours, theirs, seed=1) == paired_ratio(ours, theirs, seed=1)
    assert paired_ratio(ours, theirs, seed=1, resamples=50) != paired_ratio(ours, theirs, seed=2, resamples=50)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    source = random.Random(7)
    covered = 0
    for seed in range(100):
        ratios = [source.lognormvariate(0.2, 0.3) for _ in range(25)]
        found = paired_ratio(ratios, [1.0] * 25, resamples=200, seed=seed)
        covered += found.low <= 1.2214 <= found.high
    assert 85 <= covered <= 100


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([], []), ([1.0] * 4, [1.0] * 4), ([1.0] * 5, [1.0] * 6), ([0.0] * 5, [1.0] * 5), ([1.0] * 5, [-1.0] * 5)],
)
def test_ratios_of_nonsense(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|above 0"):
        paired_ratio(ours, theirs)
