"""When a probe is too dear for its engine: the cost of its calls against the time of the engine's steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose_executor.probe_cost import SHARE_MAX, WINDOW_S, ProbeCost

STEP_S = 0.01


def steps(cost: ProbeCost, count: int, call_s: float, busy_s: float = 0.0) -> tuple[int, str]:
    """So many steps with a call each, from `busy_s` on: after how many of them it had to go, and why."""
    for number in range(1, count + 1):
        why = cost.spent(call_s, busy_s + STEP_S * number)
        if why:
            return number, why
    return count, ""


def test_a_cheap_probe_stays_for_ever() -> None:
    assert steps(ProbeCost(), 10_000, 15e-6)[1] == ""
    assert steps(ProbeCost(), 10_000, 0.9 * SHARE_MAX * STEP_S)[1] == ""


def test_a_dear_one_goes_after_two_windows() -> None:
    number, why = steps(ProbeCost(), 10_000, 0.2 * STEP_S)
    assert number == round(2 * WINDOW_S / STEP_S)
    assert why == "its calls took 20% of the time of the engine's steps, allowed is at most 5%"


def test_one_dear_window_is_forgotten_after_a_cheap_one() -> None:
    cost, window = ProbeCost(), round(WINDOW_S / STEP_S)
    for turn in range(20):
        call_s = 0.2 * STEP_S if turn % 2 else 15e-6
        assert steps(cost, window, call_s, busy_s=turn * WINDOW_S)[1] == ""


@given(st.lists(st.integers(0, 199), min_size=10, max_size=10), st.floats(0, 600))
def test_standing_still_once_in_each_window_is_no_cost(moments: list[int], still_s: float) -> None:
    """A machine that is stopped, or kept busy by others, in the middle of a call."""
    cost = ProbeCost()
    for turn, moment in enumerate(moments):
        for number in range(1, 201):
            call_s = still_s if number - 1 == moment else 15e-6
            assert cost.spent(call_s, turn * WINDOW_S + STEP_S * number) == ""


def test_a_file_system_that_hangs_in_each_call_is_noticed_within_a_few_of_them() -> None:
    cost = ProbeCost()
    why = [cost.spent(5.0, 5.0 * number) for number in range(1, 10)]
    assert [bool(one) for one in why].index(True) == 5


def test_what_no_step_was_seen_for_is_held_against_none() -> None:
    cost = ProbeCost()
    assert [cost.spent(1.0, 0.0) for _ in range(100)] == [""] * 100
