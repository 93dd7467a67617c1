"""Slack admission in virtual time: serving state in, tokens and sequences out."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.slo import Slo
from rose_executor.board_states import ServingState
from rose_executor.slack import Allowance, SlackAdmission, SlackPolicy, slack_s
from rose_executor.step_profile import StepProfile
from rose_executor.step_shape import StepShape

SLO = Slo(ttft_s=0.2, tpot_s=0.05)
POLICY = SlackPolicy(SLO, tokens_max=256, seqs_max=64)
IDLE = ServingState(9, 0, 0, 0.0, 90.0, 0.01, 0, 0, 100, 0.0)
TICK_S = 0.005


def serving(
    now_s: float, running: int = 1, waiting: int = 0, step_s: float = 0.01, since_s: float = 0.0, waited_s: float = 0.0
) -> ServingState:
    """A serving engine whose last step ended `since_s` ago and whose oldest request waits for `waited_s`."""
    oldest = now_s - waited_s if waiting else 0.0
    return ServingState(9, running, waiting, oldest, now_s - since_s, step_s, 10, 5, 100, 0.0)


def cost(per_token_s: float = 0.001) -> StepProfile:
    profile = StepProfile()
    for tokens in (1, 50, 100):
        profile.saw(StepShape(tokens), per_token_s * tokens, 0.0)
    return profile


def settle(admission: SlackAdmission, state: ServingState | None, seconds: float, start_s: float = 100.0) -> Allowance:
    """Ticks under one unchanging state; the last allowance."""
    allowance = Allowance(0, 0)
    for tick in range(round(seconds / TICK_S) + 1):
        allowance = admission.allow(state, cost(), start_s + tick * TICK_S)
    return allowance


@pytest.mark.parametrize(
    ("state", "slack"),
    [
        (None, 0.0),
        (IDLE, 0.05),
        (serving(100.0), 0.04),
        (serving(100.0, step_s=0.06), 0.0),
        (serving(100.0, since_s=0.03), 0.02),  # this step takes longer than the last
        (serving(100.0, since_s=3.0), 0.0),
        (serving(100.0, waiting=1, waited_s=0.1), 0.04),
        (serving(100.0, waiting=1, waited_s=0.18), 0.01),
        (serving(100.0, running=0, waiting=1, waited_s=0.1), 0.09),
        (serving(100.0, running=0, waiting=1, waited_s=0.3), 0.0),
    ],
)
def test_slack(state: ServingState | None, slack: float) -> None:
    assert slack_s(state, POLICY, 100.0) == pytest.approx(slack)


def test_the_guest_gets_what_its_step_cost_leaves_room_for() -> None:
    fits = cost().tokens_within(0.05, 256)
    assert fits == pytest.approx(50, abs=1)
    assert settle(SlackAdmission(POLICY), IDLE, 2.0) == Allowance(fits, fits)


def test_a_partition_that_keeps_them_apart_leaves_room_for_more() -> None:
    apart = SlackPolicy(SLO, tokens_max=4096, seqs_max=64, interference=0.1)
    assert settle(SlackAdmission(apart), IDLE, 2.0).tokens_per_step == pytest.approx(500, abs=5)


def test_serving_unknown_gives_nothing_at_once() -> None:
    admission = SlackAdmission(POLICY)
    settle(admission, IDLE, 1.0)
    assert admission.allow(None, cost(), 101.1).tokens_per_step == 0


def test_less_slack_takes_effect_at_once_and_more_grows_by_doubling() -> None:
    admission = SlackAdmission(POLICY)
    settle(admission, IDLE, 2.0)
    assert admission.allow(serving(102.1, step_s=0.045), cost(), 102.1).tokens_per_step == pytest.approx(5, abs=1)
    grown = [admission.allow(IDLE, cost(), 102.1 + tick * TICK_S).tokens_per_step for tick in range(1, 80)]
    steps_up = sorted({*grown})
    assert all(more <= max(2 * less, 8) for less, more in itertools.pairwise(steps_up))
    assert grown[0] == pytest.approx(5, abs=1)
    assert grown[-1] == pytest.approx(50, abs=1)


def test_more_is_no_more_than_was_there_all_the_time() -> None:
    admission = SlackAdmission(POLICY)
    settle(admission, serving(100.0, step_s=0.046), 1.0)
    for tick in range(100):
        now_s = 102.0 + tick * TICK_S
        state = serving(now_s, step_s=0.044 if tick % 10 == 5 else 0.01)
        tokens = admission.allow(state, cost(), now_s).tokens_per_step
        assert tokens <= cost().tokens_within(0.006, 256)


def test_a_slack_that_swings_leaves_the_guest_at_its_lower_end() -> None:
    """Serving's steps take 10 and 40 ms in turn: the guest is not given more in every other step."""
    admission = SlackAdmission(POLICY)
    given_tokens = []
    for tick in range(400):
        now_s = 100.0 + tick * TICK_S
        state = serving(now_s, step_s=0.01 if tick % 8 < 4 else 0.04)
        given_tokens.append(admission.allow(state, cost(), now_s).tokens_per_step)
    settled = given_tokens[100:]
    assert min(settled) == max(settled) == cost().tokens_within(0.01, 256)


def test_sequences_outlast_a_burst_and_then_follow() -> None:
    admission = SlackAdmission(POLICY)
    before = settle(admission, IDLE, 1.0).active_seqs
    assert settle(admission, serving(101.0, step_s=0.06), 1.0, start_s=101.1).active_seqs == before
    after = [admission.allow(None, cost(), 103.0 + second).active_seqs for second in range(100)]
    assert after[:9] == [before] * 9
    assert after[-1] == 1
    assert sorted(after, reverse=True) == after


def test_one_slow_step_does_not_shut_a_guest_out_for_ever() -> None:
    """It may try a little, in a tenth of the time, and only beside an idle engine."""
    slow = StepProfile()
    slow.saw(StepShape(8), 0.9, 0.0)
    admission, allowed = SlackAdmission(POLICY), []
    for tick in range(2000):
        now_s = 100.0 + tick * TICK_S
        allowed.append(admission.allow(IDLE, slow, now_s).tokens_per_step)
    assert set(allowed) == {0, 8}
    assert 0.05 < sum(tokens > 0 for tokens in allowed) / len(allowed) <= 0.1
    busy = [
        admission.allow(serving(200.0 + t, running=0, waiting=1), slow, 200.0 + t).tokens_per_step for t in range(9)
    ]
    assert set(busy) == {0}


def test_what_a_trial_teaches_opens_the_gate() -> None:
    profile, admission = StepProfile(), SlackAdmission(POLICY)
    profile.saw(StepShape(8), 0.9, 0.0)
    for tick in range(4000):
        allowance = admission.allow(IDLE, profile, 100.0 + tick * TICK_S)
        if allowance.tokens_per_step:
            profile.saw(StepShape(allowance.tokens_per_step), 0.001 * allowance.tokens_per_step, 100.0 + tick * TICK_S)
    assert allowance.tokens_per_step >= 40


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_an_slo_that_is_none_is_refused(ttft_s: float, tpot_s: float) -> None:
    with pytest.raises(ConfigError, match="no SLO"):
        Slo(ttft_s, tpot_s)


@pytest.mark.parametrize("changes", [{"interference": 0.0}, {"interference": 1.5}, {"tokens_max": 0}, {"seqs_max": 0}])
def test_a_policy_that_admits_nobody_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="no policy"):
        SlackPolicy(**{"slo": SLO, "tokens_max": 8, "seqs_max": 8, **changes})  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.floats(0.01, 1.0))
def test_no_allowance_ever_costs_more_than_the_slack(seed: int, interference: float) -> None:
    """Random serving states, times and step costs: what is given fits the slack of that very moment, and the bounds.

    But for a trial of a few tokens beside an idle engine.
    """
    random_source = random.Random(seed)
    policy = SlackPolicy(SLO, tokens_max=200, seqs_max=16, interference=interference)
    admission, profile, now_s = SlackAdmission(policy), StepProfile(), 100.0
    for _ in range(200):
        now_s += random_source.choice((0.001, TICK_S, 0.5))
        state = random_source.choice(
            (
                None,
                IDLE,
                serving(now_s, step_s=random_source.uniform(0, 0.08), since_s=random_source.uniform(0, 0.06)),
                serving(now_s, running=0, waiting=3, waited_s=random_source.uniform(0, 0.3)),
            )
        )
        if random_source.random() < 0.3:
            tokens = random_source.randint(1, 200)
            profile.saw(StepShape(tokens), random_source.uniform(0.0001, 0.001) * tokens, now_s)
        allowance = admission.allow(state, profile, now_s)
        cost_s = profile.seconds(StepShape(allowance.tokens_per_step)) * interference
        assert cost_s <= slack_s(state, policy, now_s) + 1e-12 or (
            allowance.tokens_per_step <= (8 if state is IDLE else 0)
        )
        assert 0 <= allowance.tokens_per_step <= 200
        assert 1 <= allowance.active_seqs <= 16
