"""Parts of a sum, tracked: rows in, parts out that fit them and are never negative."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.tracking_fit import TrackingFit

ROWS = st.lists(
    st.tuples(*[st.floats(0, 1e6)] * 3, st.floats(-8, 8), st.floats(0.001, 1)).filter(lambda row: max(row[:3]) > 1e-6),
    max_size=60,
)


def unknown() -> TrackingFit:
    return TrackingFit([0.0, 0.0, 0.0], [[100.0, 0.0, 0.0], [0.0, 100.0, 0.0], [0.0, 0.0, 100.0]])


def tell(fit: TrackingFit, row: tuple[float, float, float], target: float, weight: float = 1.0) -> None:
    made = sum(value * part for value, part in zip(fit.parts, row, strict=True))
    fit.learn(row, target - made, weight)


def test_what_rows_agree_on_is_found() -> None:
    fit, seeded = unknown(), random.Random(1)
    for _ in range(200):
        row = (1.0, seeded.uniform(0, 3), seeded.uniform(0, 3))
        tell(fit, row, 2 + 0.5 * row[1] + 3 * row[2] + seeded.gauss(0, 0.01))
    assert fit.parts == pytest.approx([2, 0.5, 3], abs=0.02)


def test_a_part_that_would_be_negative_is_nought_and_the_others_fit_without_it() -> None:
    fit = unknown()
    for size in (0.0, 1.0, 2.0, 1.0) * 50:
        tell(fit, (1.0, size, 0.0), 5 - size)
    assert fit.parts[1] == pytest.approx(0, abs=1e-6)
    assert fit.parts[0] == pytest.approx(4, abs=0.1)


def test_what_nobody_tells_anew_is_not_forgotten() -> None:
    """Ten thousand rows of one direction: by plain forgetting nothing would be left of the others."""
    fit = unknown()
    for _ in range(50):
        tell(fit, (1.0, 0.0, 0.0), 2)
        tell(fit, (1.0, 4.0, 0.0), 4)
    before = fit.leverage((0.0, 1.0, 0.0))
    for _ in range(10_000):
        tell(fit, (1.0, 0.0, 0.0), 2)
    assert fit.parts == pytest.approx([2, 0.5, 0], abs=0.02)
    assert fit.leverage((0.0, 1.0, 0.0)) <= before


def test_a_part_that_may_wander_is_followed_and_one_that_may_not_is_an_average() -> None:
    still, wandering = unknown(), unknown()
    for target in (2.0, 6.0):
        for _ in range(300):
            tell(still, (1.0, 0.0, 0.0), target)
            wandering.wander(0.01, wandering.parts)
            tell(wandering, (1.0, 0.0, 0.0), target)
    assert still.parts[0] == pytest.approx(4, rel=0.01)
    assert wandering.parts[0] == pytest.approx(6, rel=0.01)


def test_what_is_not_known_of_a_part_does_not_grow_beyond_its_size() -> None:
    fit = TrackingFit([2.0, 3.0], [[1e-6, 0.0], [0.0, 50.0]])
    for _ in range(10_000):
        fit.wander(0.01, fit.parts)
    assert fit.covariance[0][0] == pytest.approx(4, rel=0.02)
    assert fit.covariance[1][1] == 50


def test_loosened_it_learns_from_any_row_that_all_has_changed_by_one_factor() -> None:
    fit = unknown()
    for _ in range(100):
        tell(fit, (1.0, 0.0, 0.0), 2)
        tell(fit, (0.0, 1.0, 0.0), 4)
    fit.loosen(100.0)
    tell(fit, (1.0, 0.0, 0.0), 6)
    assert fit.parts[:2] == pytest.approx([6, 12], rel=0.03)


def test_a_covariance_that_is_none_becomes_one() -> None:
    spoilt = TrackingFit([1.0, 1.0], [[1.0, -5.0], [-5.0, 1.0]])
    assert spoilt.leverage((1.0, 1.0)) == 2
    assert spoilt.covariance == [[1.0, 0.0], [0.0, 1.0]]


@given(ROWS)
def test_no_part_is_ever_negative_and_no_variance_lost(rows: list[tuple[float, ...]]) -> None:
    """Rows of any size and direction, with errors that contradict each other."""
    fit = unknown()
    for *row, error, weight in rows:
        assert fit.leverage(row) > 0
        fit.learn(row, error, weight)
        assert min(fit.parts) >= 0
        assert all(fit.covariance[i][i] > 0 for i in range(3))
        assert all(
            fit.covariance[i][j] == pytest.approx(fit.covariance[j][i], rel=1e-6, abs=1e-12)
            for i in range(3)
            for j in range(3)
        )
