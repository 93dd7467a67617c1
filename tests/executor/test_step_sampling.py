"""Which steps are learnt from."""

from __future__ import annotations

import pytest

from rose_executor.step_sampling import EACH_OF_FIRST, LEFT_OUT_MAX, StepSampling


def test_each_of_the_first() -> None:
    sampling = StepSampling()
    assert all(sampling.takes(learnt, 0.001) for learnt in range(EACH_OF_FIRST))


@pytest.mark.parametrize(
    ("seconds", "one_in"),
    [(0.0, LEFT_OUT_MAX + 1), (1e-4, LEFT_OUT_MAX + 1), (0.007, 8), (0.03, 2), (0.051, 1), (9.0, 1)],
)
def test_then_fewer_of_short_steps_than_of_long_ones(seconds: float, one_in: int) -> None:
    sampling = StepSampling()
    taken = [sampling.takes(EACH_OF_FIRST, seconds) for _ in range(10 * one_in)]
    assert [at for at, one in enumerate(taken) if one] == list(range(0, 10 * one_in, one_in))
