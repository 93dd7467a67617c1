"""When the cost of steps has drifted, and by how much: ratios in, margin out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.step_drift import BAND, MARGIN_MAX, Drift, StepDrift


def told(*ratios: float, drift: StepDrift | None = None) -> StepDrift:
    drift = StepDrift() if drift is None else drift
    for at, ratio in enumerate(ratios):
        drift.saw(ratio, 100.0 + at)
    return drift


def test_steps_that_cost_what_is_expected_need_no_margin() -> None:
    seeded = random.Random(1)
    drift = told(*(seeded.uniform(0.7, 1.3) for _ in range(1000)))
    assert (drift.margin, drift.drift) == (1.0, None)


def test_one_slow_step_in_twenty_is_no_drift() -> None:
    drift = StepDrift()
    for _ in range(20):
        told(*[1.0] * 19, 30.0, drift=drift)
        assert (drift.margin, drift.drift) == (1.0, None)


def test_slower_steps_widen_the_margin_with_the_seventh_and_it_says_since_when() -> None:
    drift = told(*[1.0] * 64)
    margins = []
    for at in range(10):
        drift.saw(3.0, 500.0 + at)
        margins.append(drift.margin)
    assert margins == [1.0] * 6 + [3.0] * 4
    assert drift.drift == Drift(since_s=506.0, factor=3.0)


def test_the_margin_narrows_as_soon_as_the_profile_has_learnt() -> None:
    """Long before the slow steps have left the window."""
    drift = told(*[1.0] * 64, *[3.0] * 32)
    told(*[1.1] * 16, drift=drift)
    assert drift.margin == pytest.approx(1.1)
    assert drift.drift is not None
    told(*[1.1] * 64, drift=drift)
    assert (drift.margin, drift.drift) == (1.0, None)


def test_faster_steps_are_drift_too_and_need_no_margin() -> None:
    drift = told(*[1.0] * 64, *[0.3] * 64)
    assert drift.margin == 1.0
    assert drift.drift == Drift(since_s=pytest.approx(221.0), factor=0.3)


def test_what_hovers_about_the_edge_of_the_band_is_told_once() -> None:
    drift = told(*[1.0] * 64, *[BAND + 0.05] * 64)
    assert drift.drift is not None
    since_s = drift.drift.since_s
    for _ in range(10):
        told(*[BAND - 0.05] * 64, *[BAND + 0.05] * 64, drift=drift)
        assert drift.drift is not None
        assert drift.drift.since_s == since_s


def test_few_steps_prove_nothing() -> None:
    assert told(*[9.0] * 15).drift is None
    assert told(*[9.0] * 16).margin == MARGIN_MAX


@given(st.lists(st.floats(1e-12, 1e12), max_size=200))
def test_the_margin_is_bounded_whatever_happens(ratios: list[float]) -> None:
    drift = StepDrift()
    for ratio in ratios:
        drift.saw(ratio, 1.0)
        assert 1 <= drift.margin <= MARGIN_MAX
        assert drift.margin == 1 or drift.drift is not None
