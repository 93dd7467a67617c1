from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.observer.exposition import Sample
from rose.observer.growth import Growth


def samples(**values: float) -> dict[str, tuple[Sample, ...]]:
    return {"n": tuple(Sample({"who": who}, value) for who, value in values.items())}


def grown(growth: Growth, seconds: float) -> dict[str, float]:
    return {sample.labels["who"]: sample.value for sample in growth.over(seconds, "n")[1]}


lives = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=5)


@given(lives)
def test_growth_is_what_was_counted_in_all_lives(steps_of_lives: list[list[int]]) -> None:
    """A process counts up from 0, dies, and its successor counts up from 0 again, seen after each step."""
    growth, at_s, expected, before = Growth(1e9, 1000), 0.0, 0, None
    for steps in steps_of_lives:
        total = 0
        for step in steps:
            total += step
            growth.look(at_s, samples(a=total))
            # The first look ever is where counting begins; a fall is a new life, what rises is growth.
            if before is not None:
                expected += total - before if total >= before else total
            before, at_s = total, at_s + 1
    assert grown(growth, 1e9) == {"a": expected}


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(1, 60))
def test_a_window_holds_its_last_steps_alone(steps: list[int], seconds: int) -> None:
    growth, total = Growth(300.0, 1000), 0
    for at_s, step in enumerate(steps):
        total += step
        growth.look(float(at_s), samples(a=total))
    seen_s, _ = growth.over(seconds, "n")
    assert seen_s == min(seconds, len(steps) - 1)
    assert grown(growth, seconds) == {"a": sum(steps[1:][-seconds:])}


def test_a_counter_that_appears_later_has_grown_from_0() -> None:
    growth = Growth(60.0, 100)
    growth.look(0.0, samples(a=5))
    growth.look(1.0, samples(a=6, b=3))
    assert grown(growth, 15.0) == {"a": 1, "b": 3}


def test_a_counter_that_is_not_said_for_a_while_goes_on() -> None:
    growth = Growth(60.0, 100)
    for at_s, value in enumerate((5.0, None, 7.0)):
        growth.look(float(at_s), {} if value is None else samples(a=value))
    assert grown(growth, 15.0) == {"a": 2}


def test_looks_are_bounded_in_number_and_in_time() -> None:
    growth = Growth(10.0, 4)
    for at_s in range(20):
        growth.look(float(at_s), samples(a=at_s))
    assert growth.over(1e9, "n")[0] == 3
    growth = Growth(10.0, 1000)
    for at_s in range(20):
        growth.look(float(at_s), samples(a=at_s))
    assert growth.over(1e9, "n")[0] == 10
    assert Growth(1.0, 1).over(1.0, "n") == (pytest.approx(0.0), [])
