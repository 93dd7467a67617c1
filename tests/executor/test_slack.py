"""Slack admission in virtual time: serving state in, tokens and sequences out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.slo import Slo
from rose_executor.board_states import ServingState
from rose_executor.slack import SPEND, Allowance, SlackAdmission, SlackPolicy, slack_s
from rose_executor.step_profile import StepProfile
from rose_executor.step_shape import StepShape

SLO = Slo(ttft_s=0.2, tpot_s=0.05)
POLICY = SlackPolicy(SLO, tokens_max=256, seqs_max=64)
IDLE = ServingState(steps=9, stepped_at_s=90.0, step_s=0.01, kv_blocks_total=100)
TICK_S = 0.005


def serving(
    now_s: float,
    decoding: int = 1,
    unanswered: int = 0,
    next_step_s: float = 0.01,
    since_s: float = 0.0,
    waited_s: float = 0.0,
    steps: int = 9,
) -> ServingState:
    """A serving engine whose last step ended `since_s` ago and whose oldest unanswered request is `waited_s` old."""
    return ServingState(
        steps=steps,
        running=decoding,
        waiting=unanswered,
        decoding=decoding,
        unanswered=unanswered,
        oldest_unanswered_at_s=now_s - waited_s if unanswered else 0.0,
        stepped_at_s=now_s - since_s,
        next_step_s=next_step_s,
        first_token_s=0.02,
    )


def cost(per_token_s: float = 0.001) -> StepProfile:
    profile = StepProfile()
    for tokens in (1, 50, 100):
        profile.saw(StepShape(tokens), per_token_s * tokens, 100.0)
    return profile


def allowed(state: ServingState | None, now_s: float = 100.0, policy: SlackPolicy = POLICY) -> int:
    return SlackAdmission().allow(state, policy, cost(), now_s).tokens_per_step


@pytest.mark.parametrize(
    ("state", "slack"),
    [
        (None, 0.0),
        (IDLE, 0.1),
        (serving(100.0), 0.04),
        (serving(100.0, next_step_s=0.06), 0.0),
        (serving(100.0, since_s=0.03), 0.02),  # this step takes longer than expected
        (serving(100.0, since_s=3.0), 0.0),
        (serving(100.0, unanswered=1, waited_s=0.1), 0.04),
        (serving(100.0, unanswered=1, waited_s=0.17), 0.01),
        (serving(100.0, decoding=0, unanswered=1, waited_s=0.1), 0.08),
        (serving(100.0, decoding=0, unanswered=1, since_s=3.0, waited_s=0.1), 0.08),  # no token is owed to anybody
        (serving(100.0, decoding=0, unanswered=1, waited_s=0.3), 0.0),
    ],
)
def test_slack(state: ServingState | None, slack: float) -> None:
    assert slack_s(state, SLO, 100.0) == pytest.approx(slack)


def observed(state: ServingState, looked_at_s: float = 99.9) -> ServingState:
    """The same, seen from outside."""
    return state._replace(looked_at_s=looked_at_s)


@pytest.mark.parametrize(
    ("state", "computed_s", "slack"),
    [
        (IDLE, 0.0, 0.05),  # and not the larger part of ttft_s: whoever has come since may be decoding by now
        (IDLE, 0.03, 0.02),
        (IDLE, 0.06, 0.0),
        (IDLE._replace(next_step_s=0.01), 0.03, 0.01),
        (serving(100.0), 0.0, 0.04),
        (serving(100.0, since_s=3.0), 0.03, 0.01),  # no step is late that nobody could have seen
        (serving(100.0, decoding=0, unanswered=1, waited_s=0.1), 0.0, 0.04),
        (serving(100.0, decoding=0, unanswered=1, waited_s=0.17), 0.0, 0.01),
    ],
)
def test_slack_beside_an_engine_that_is_looked_at_from_outside(
    state: ServingState, computed_s: float, slack: float
) -> None:
    assert slack_s(observed(state), SLO, 100.0, computed_s=computed_s) == pytest.approx(slack)


@given(
    state=st.sampled_from([IDLE, serving(100.0), serving(100.0, decoding=0, unanswered=1)]),
    next_step_s=st.floats(0, 0.06),
    interference=st.sampled_from([0.1, 0.5, 1.0]),
    per_token_s=st.floats(0.0001, 0.01),
)
def test_between_two_looks_a_guest_costs_no_token_of_serving_its_time(
    state: ServingState, next_step_s: float, interference: float, per_token_s: float
) -> None:
    """However many steps it takes, and whatever comes in meanwhile that nobody sees."""
    policy = SlackPolicy(SLO, tokens_max=256, seqs_max=64, interference=interference)
    admission, profile = SlackAdmission(), cost(per_token_s)
    for look in range(2):  # in less than the second after which it may try
        state = observed(state._replace(next_step_s=next_step_s), 100.0 + 0.4 * look)
        total_s = 0.0
        for tick in range(80):
            tokens = admission.allow(state, policy, profile, state.looked_at_s + TICK_S * tick).tokens_per_step
            step_s = profile.seconds(StepShape(tokens)) if tokens else 0.0
            admission.computed(step_s)
            total_s += interference * step_s
        assert total_s <= max(0.0, SLO.tpot_s - next_step_s) + 1e-9
        if not state.unanswered and next_step_s + 4 * interference * per_token_s < SLO.tpot_s:
            assert total_s > 0.0  # each look counts anew


def test_what_the_guest_has_computed_beside_a_step_is_owed_to_it() -> None:
    state = serving(100.0)
    assert slack_s(state, SLO, 100.0, computed_s=0.03) == pytest.approx(0.01)
    assert slack_s(state, SLO, 100.0, computed_s=0.03, interference=0.1) == pytest.approx(0.037)
    waits = serving(100.0, decoding=0, unanswered=1, waited_s=0.1)
    assert slack_s(waits, SLO, 100.0, computed_s=0.03) == pytest.approx(0.08)  # its wait has that in it already


def test_the_guest_gets_what_its_step_cost_leaves_room_for() -> None:
    fits = cost().tokens_within(SPEND * 0.1, 256)
    assert fits == pytest.approx(50, abs=1)
    assert SlackAdmission().allow(IDLE, POLICY, cost(), 100.0) == Allowance(fits, fits)


def test_a_partition_that_keeps_them_apart_leaves_room_for_more() -> None:
    apart = SlackPolicy(SLO, tokens_max=4096, seqs_max=64, interference=0.1)
    assert allowed(IDLE, policy=apart) == pytest.approx(500, abs=5)


def test_serving_unknown_gives_nothing() -> None:
    assert allowed(None) == 0


def test_many_small_steps_beside_one_of_serving_get_no_more_than_one_large() -> None:
    admission, profile, given_s = SlackAdmission(), cost(), 0.0
    for _ in range(100):
        tokens = admission.allow(serving(100.0), POLICY, profile, 100.0).tokens_per_step
        seconds = profile.seconds(StepShape(tokens)) if tokens else 0.0
        given_s += seconds
        admission.computed(seconds)
    assert 0.03 < given_s < 0.04
    assert admission.allow(serving(100.0, steps=10), POLICY, profile, 100.0).tokens_per_step == pytest.approx(20, abs=1)


def test_steps_under_way_count_as_computed() -> None:
    admission = SlackAdmission()
    assert admission.allow(serving(100.0), POLICY, cost(), 100.0, under_way_s=0.03).tokens_per_step <= 5
    assert admission.allow(serving(100.0), POLICY, cost(), 100.0, under_way_s=0.05).tokens_per_step == 0


def test_sequences_outlast_a_burst_and_then_follow() -> None:
    admission = SlackAdmission()
    before = admission.allow(IDLE, POLICY, cost(), 100.0).active_seqs
    late = serving(100.1, next_step_s=0.06)
    assert admission.allow(late, POLICY, cost(), 100.1).active_seqs == before
    after = [admission.allow(None, POLICY, cost(), 101.0 + second).active_seqs for second in range(100)]
    assert after[:9] == [before] * 9
    assert after[-1] == 1
    assert sorted(after, reverse=True) == after


def test_one_slow_step_does_not_shut_a_guest_out_for_ever() -> None:
    """It may try a little, in a tenth of the time, and only beside an idle engine."""
    slow = StepProfile()
    slow.saw(StepShape(8), 0.9, 1.0)
    admission, tokens = SlackAdmission(), []
    for tick in range(2000):
        tokens.append(admission.allow(IDLE, POLICY, slow, 100.0 + tick * TICK_S).tokens_per_step)
    assert set(tokens) == {0, 8}
    assert 0.05 < sum(some > 0 for some in tokens) / len(tokens) <= 0.1
    busy = [
        admission.allow(serving(200.0 + t, decoding=0, unanswered=1), POLICY, slow, 200.0 + t).tokens_per_step
        for t in range(9)
    ]
    assert set(busy) == {0}


def test_what_a_trial_teaches_opens_the_gate() -> None:
    profile, admission = StepProfile(), SlackAdmission()
    profile.saw(StepShape(8), 0.9, 1.0)
    for tick in range(4000):
        allowance = admission.allow(IDLE, POLICY, profile, 100.0 + tick * TICK_S)
        if allowance.tokens_per_step:
            profile.saw(StepShape(allowance.tokens_per_step), 0.001 * allowance.tokens_per_step, 100.0)
    assert allowance.tokens_per_step >= 40


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_an_slo_that_is_none_is_refused(ttft_s: float, tpot_s: float) -> None:
    with pytest.raises(ConfigError, match="no SLO"):
        Slo(ttft_s, tpot_s)


@pytest.mark.parametrize(
    "changes", [{"interference": 0.0}, {"interference": 1.5}, {"tokens_max": -1}, {"seqs_max": -1}]
)
def test_a_policy_that_makes_no_sense_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="no policy"):
        SlackPolicy(**{"slo": SLO, "tokens_max": 8, "seqs_max": 8, **changes})  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.floats(0.01, 1.0))
def test_no_allowance_ever_costs_more_than_the_slack(seed: int, interference: float) -> None:
    """Random serving states, times and step costs: what is given fits the slack of that very moment, and the bounds.

    But for a trial of a few tokens beside an idle engine.
    """
    source = random.Random(seed)
    policy = SlackPolicy(SLO, tokens_max=200, seqs_max=16, interference=interference)
    admission, profile, now_s, computed_s, steps = SlackAdmission(), StepProfile(), 100.0, 0.0, 9
    for _ in range(200):
        now_s += source.choice((0.001, TICK_S, 0.5))
        if source.random() < 0.3:
            steps, computed_s = steps + 1, 0.0
        state = source.choice(
            (
                None,
                IDLE,
                serving(now_s, next_step_s=source.uniform(0, 0.08), since_s=source.uniform(0, 0.06), steps=steps),
                serving(now_s, decoding=0, unanswered=3, waited_s=source.uniform(0, 0.3), steps=steps),
            )
        )
        if state is IDLE:
            steps, computed_s = 9, computed_s if steps == 9 else 0.0
        if source.random() < 0.3:
            tokens = source.randint(1, 200)
            profile.saw(StepShape(tokens), source.uniform(0.0001, 0.001) * tokens, now_s)
        allowance = admission.allow(state, policy, profile, now_s)
        slack = slack_s(state, SLO, now_s, computed_s=computed_s, interference=interference)
        assert profile.seconds(StepShape(allowance.tokens_per_step)) * interference <= slack + 1e-12 or (
            allowance.tokens_per_step <= (8 if state is IDLE else 0)
        )
        assert 0 <= allowance.tokens_per_step <= 200
        assert 1 <= allowance.active_seqs <= 16
        if allowance.tokens_per_step and source.random() < 0.5:
            seconds = profile.seconds(StepShape(allowance.tokens_per_step))
            admission.computed(seconds)
            computed_s += seconds
