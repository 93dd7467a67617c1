"""What a guest may compute in its next step, from what the board says."""

from __future__ import annotations

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from rose_executor.board_states import Given, Quota, ServingState
from rose_executor.guest_admission import GuestAdmission, Pending
from rose_executor.slack import Allowance
from rose_executor.step_shape import StepShape

LIMITS = Quota(kv_blocks=100, tokens_per_step=512, active_seqs=16, gate_open=True)
PLAIN = Quota(kv_blocks=50, tokens_per_step=64, active_seqs=8, gate_open=True)
ASKING = PLAIN._replace(ttft_s=0.2, tpot_s=0.05)
IDLE = ServingState(steps=9)
LATE = ServingState(steps=9, running=1, decoding=1, next_step_s=0.06)


def admission(quota: Quota | None, serving: ServingState | None = None, now_s: float = 10.0) -> GuestAdmission:
    made = GuestAdmission(LIMITS, now_s)
    made.look(Given(quota, 7, serving), now_s)
    return made


@pytest.mark.parametrize(
    ("quota", "serving", "allowed"),
    [
        (None, IDLE, Allowance(0, 0)),
        (PLAIN, None, Allowance(64, 8)),  # without an SLO nobody asks for slack
        (PLAIN._replace(gate_open=False), IDLE, Allowance(0, 0)),
        (ASKING, None, Allowance(0, 1)),
        (ASKING, LATE, Allowance(0, 1)),
        (ASKING, IDLE, Allowance(8, 8)),  # of a guest that has taken no step yet
    ],
)
def test_what_is_allowed(quota: Quota | None, serving: ServingState | None, allowed: Allowance) -> None:
    made = admission(quota, serving)
    assert made.allowed == allowed
    assert made.open == (allowed.tokens_per_step > 0)


def test_without_slack_running_requests_stay_and_a_smaller_quota_takes_them() -> None:
    made = admission(ASKING, LATE)
    assert made.seqs_kept == 8
    made.look(Given(ASKING._replace(active_seqs=3), 8, LATE), 10.1)
    assert made.seqs_kept == 3
    made.look(Given(None, 0, LATE), 10.2)
    assert (made.seqs_kept, made.quota.gate_open, made.quota_number) == (3, False, 0)


def test_how_long_it_was_open_is_counted() -> None:
    made = admission(ASKING, IDLE, 10.0)
    made.look(Given(ASKING, 8, LATE), 10.25)
    made.look(Given(ASKING, 8, LATE), 11.0)
    made.look(Given(ASKING, 8, IDLE), 12.0)
    assert made.open_s == 0.25
    made.look(Given(ASKING, 8, IDLE), 12.5)
    assert made.open_s == 0.75


def test_a_step_under_way_counts_by_what_it_is_expected_to_cost() -> None:
    made = admission(ASKING, IDLE)
    for _ in range(50):
        made.computed(StepShape(5), 0.005, 10.0)
        made.computed(StepShape(40), 0.04, 10.0)
    serving = ServingState(steps=10, running=1, decoding=1, next_step_s=0.01)
    made.look(Given(ASKING, 8, serving._replace(stepped_at_s=11.0)), 11.0)
    alone = made.allowed.tokens_per_step
    made.look(Given(ASKING, 8, serving._replace(steps=11, stepped_at_s=11.0)), 11.0, Pending(under_way=[StepShape(20)]))
    assert alone == pytest.approx(20, abs=1)
    assert made.allowed.tokens_per_step == pytest.approx(10, abs=1)


def test_steps_of_a_kind_that_take_turns_with_others_are_followed_long_after_the_first_ones() -> None:
    made, now_s = admission(ASKING, IDLE), 10.0
    for factor in (1.0, 3.0):
        for _ in range(3000):
            for tokens, seconds in ((5, 0.001), (40, factor * 0.002)):
                now_s += seconds
                made.computed(StepShape(tokens), seconds, now_s)
        assert made.profile.seconds(StepShape(40)) == pytest.approx(factor * 0.002, rel=0.2)
    assert made.profile.steps < 2000


numbers = st.integers(-(2**62), 2**62)
seconds = st.floats(-1e9, 1e9, allow_nan=False)


@drawn(st.builds(Quota, numbers, numbers, numbers, st.booleans(), seconds, seconds, seconds, seconds), st.booleans())
def test_nothing_on_a_board_makes_it_raise_or_exceed_its_limits(quota: Quota, idle: bool) -> None:
    made = admission(quota, IDLE if idle else LATE)
    assert 0 <= made.allowed.tokens_per_step <= LIMITS.tokens_per_step
    assert 0 <= made.seqs_kept <= LIMITS.active_seqs
    assert 0 <= made.quota.kv_blocks <= LIMITS.kv_blocks
