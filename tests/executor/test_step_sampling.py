"""From which of its steps an engine's profile learns: every one at first, then some, that stand for all."""

from __future__ import annotations

import pytest

from rose_executor.step_sampling import EACH_OF_FIRST, ONE_IN_MAX, StepSampling


def test_each_of_the_first() -> None:
    sampling = StepSampling()
    assert all(sampling.takes(learnt, 0.001) for learnt in range(EACH_OF_FIRST))


@pytest.mark.parametrize(
    ("seconds", "one_in"),
    [(0.0, ONE_IN_MAX), (1e-320, ONE_IN_MAX), (1e-4, ONE_IN_MAX), (0.007, 8), (0.03, 2), (0.051, 1), (9.0, 1)],
)
def test_then_fewer_of_short_steps_than_of_long_ones(seconds: float, one_in: int) -> None:
    sampling = StepSampling()
    taken = [sampling.takes(EACH_OF_FIRST, seconds) for _ in range(100 * one_in)]
    assert taken[0]
    assert sum(taken) == pytest.approx(100, abs=2)
    assert any(taken[at] for at in range(len(taken) - 3 * one_in, len(taken)))


@pytest.mark.parametrize("seconds", [0.001, 0.007, 0.02, 0.03])
@pytest.mark.parametrize("period", [2, 3, 5, 8, 13, 15, 16, 17, 21, 32])
def test_steps_that_come_at_regular_intervals_are_taken_as_often_as_others(seconds: float, period: int) -> None:
    sampling = StepSampling()
    taken = [at % period for at in range(1000 * period) if sampling.takes(EACH_OF_FIRST, seconds)]
    for residue in range(period):
        assert taken.count(residue) == pytest.approx(len(taken) / period, rel=0.2)
