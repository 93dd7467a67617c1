"""Which steps are learnt from."""

from __future__ import annotations

from rose_executor.step_sampling import EACH_OF_FIRST, SPARSE, StepSampling


def test_each_of_the_first_and_then_one_in_some() -> None:
    sampling, learnt = StepSampling(), 0
    for _ in range(EACH_OF_FIRST):
        assert sampling.takes(learnt)
        learnt += 1
    later = [sampling.takes(learnt) for _ in range(10 * SPARSE)]
    assert sum(later) == 10
    assert later[:SPARSE].count(True) == 1
