"""Which requests are given back because the quota keeps them from computing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rose_executor.stalled import SET_BACKS_MAX, Stalled

ALL = ("a", "b", "c")


def test_nobody_is_given_back_who_computes_or_waits_his_turn() -> None:
    stalled = Stalled()
    for tick in range(100):
        stalled.stepped(["a"], now_s=10 + tick / 10)
        assert stalled.due(ALL, 2.0, 10 + tick / 10) == []


def test_all_are_given_back_when_none_may_compute_for_long() -> None:
    stalled = Stalled()
    stalled.stepped(["a", "b"], now_s=10.0)
    assert stalled.due(ALL, 2.0, 11.9) == []
    assert stalled.due(ALL, 2.0, 12.1) == ["a", "b"]  # "c" has been there for a moment only
    assert stalled.due(ALL, 2.0, 14.0) == list(ALL)


def test_one_that_came_to_an_idle_guest_gets_its_own_time() -> None:
    stalled = Stalled()
    assert stalled.due(["a"], 2.0, 500.0) == []
    assert stalled.due(["a"], 2.0, 501.9) == []
    assert stalled.due(["a"], 2.0, 502.0) == ["a"]


def test_one_that_was_set_back_is_given_back_though_others_compute() -> None:
    stalled = Stalled()
    stalled.stepped(ALL, now_s=10.0)
    stalled.set_back("c")
    for tick in range(40):
        now_s = 10.1 + tick / 10
        stalled.stepped(["a", "b"], now_s=now_s)
        assert stalled.due(ALL, 2.0, now_s) == (["c"] if now_s >= 12.0 else [])
    stalled.stepped(ALL, now_s=15.0)  # it has been let in again after all
    stalled.stepped(["a"], now_s=18.0)
    assert stalled.due(ALL, 2.0, 18.0) == []


def test_nobody_is_set_back_for_ever() -> None:
    stalled = Stalled()
    stalled.due(ALL, 2.0, 1.0)
    for _ in range(SET_BACKS_MAX):
        assert stalled.may_set_back("a")
        stalled.set_back("a")
    assert not stalled.may_set_back("a")
    assert stalled.may_set_back("b")


def test_without_a_limit_everybody_waits() -> None:
    stalled = Stalled()
    stalled.due(ALL, 0.0, 1.0)
    stalled.set_back("a")
    assert stalled.due(ALL, 0.0, 1e6) == []


@given(st.integers(0, 2**32))
def test_nothing_is_remembered_of_who_is_gone(seed: int) -> None:
    source, stalled, now_s = random.Random(seed), Stalled(), 0.0
    for _ in range(100):
        now_s += source.random()
        present = source.sample("abcdefgh", source.randint(0, 8))
        stalled.stepped(source.sample(present, source.randint(0, len(present))), now_s=now_s)
        for request_id in present:
            if source.random() < 0.2:
                stalled.set_back(request_id)
        due = stalled.due(present, 2.0, now_s)
        assert set(due) <= set(present)
        known = {*stalled._progressed_at_s, *stalled._set_backs, *stalled._fed}
        assert known <= set(present)
