"""A quota in figures that an engine can follow, and requests that starve."""

from __future__ import annotations

import pytest

from rose_executor.board_states import Quota
from rose_executor.quota import STARVED_AFTER_S, StarvedWatch, computes, shut, within

LIMITS = Quota(kv_blocks=100, tokens_per_step=512, active_seqs=16, gate_open=True)


@pytest.mark.parametrize("absurd", [-1, -(2**62), 2**62, 101])
def test_an_absurd_quota_is_brought_within_the_engine(absurd: int) -> None:
    quota = within(Quota(absurd, absurd, absurd, gate_open=True), LIMITS)
    assert quota == (Quota(0, 0, 0, gate_open=True) if absurd < 0 else Quota(100, min(absurd, 512), 16, gate_open=True))


def test_a_quota_within_the_limits_stays_as_it_is() -> None:
    quota = Quota(7, 8, 9, gate_open=False)
    assert within(quota, LIMITS) == quota


def test_a_shut_gate_keeps_the_blocks() -> None:
    assert shut(LIMITS) == Quota(100, 512, 16, gate_open=False)


@pytest.mark.parametrize(
    ("quota", "may"),
    [
        (LIMITS, True),
        (shut(LIMITS), False),
        (Quota(9, 0, 9, gate_open=True), False),
        (Quota(9, 9, 0, gate_open=True), False),
        (Quota(0, 9, 9, gate_open=True), True),  # for want of blocks requests starve; that is not meant so
    ],
)
def test_when_a_step_may_compute(quota: Quota, may: bool) -> None:
    assert computes(quota) == may


def starve(watch: StarvedWatch, since_s: float, until_s: float) -> None:
    """Steps every 10 ms that compute nothing although they might."""
    for tick in range(round((until_s - since_s) * 100) + 1):
        watch.stepped(wanted=True, allowed=True, scheduled_tokens=0, now_s=since_s + tick / 100)


def test_requests_that_get_nothing_are_starved_within_a_second_and_counted_once() -> None:
    watch = StarvedWatch()
    starve(watch, 10.0, 10.0 + STARVED_AFTER_S - 0.01)
    assert (watch.since_s, watch.count) == (0.0, 0)
    starve(watch, 10.0 + STARVED_AFTER_S, 12.0)
    assert (watch.since_s, watch.count) == (10.0, 1)
    assert STARVED_AFTER_S < 1.0


@pytest.mark.parametrize(
    ("wanted", "allowed", "tokens"), [(False, True, 0), (True, False, 0), (True, True, 1)], ids=["none", "shut", "fed"]
)
def test_starving_ends_with_a_token_a_shut_gate_or_no_request(wanted: bool, allowed: bool, tokens: int) -> None:
    watch = StarvedWatch()
    starve(watch, 10.0, 11.0)
    watch.stepped(wanted=wanted, allowed=allowed, scheduled_tokens=tokens, now_s=11.1)
    assert (watch.since_s, watch.count) == (0.0, 1)
    starve(watch, 11.2, 11.2 + STARVED_AFTER_S)
    assert (watch.since_s, watch.count) == (11.2, 2)
