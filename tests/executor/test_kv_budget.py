"""From blocks of serving to blocks of the guest."""

from __future__ import annotations

from rose_executor.board_states import GuestState, ServingState
from rose_executor.guest_presence import Presence
from rose_executor.kv_budget import KvBudget, MemoryFigures
from rose_executor.kv_policy import FixedSplit, KvPolicy, KvPool

POOL = KvPool(pool_bytes=1000, serving_bytes=1000, guest_bytes=800)
GUEST = GuestState(1, 1, 1, 0, 0, 0, 40, 0.0, 0, 0, 0.0, 0, 0.0)
"""Of 40 blocks, 20 bytes each."""


def serving(used: int) -> ServingState:
    """Of 100 blocks, 10 bytes each."""
    return ServingState(1, 1, 0, 0.0, 0.0, 0.01, 1, used, 100, 0.0)


def test_a_guest_that_never_said_how_many_blocks_it_has_gets_none() -> None:
    assert KvBudget(KvPolicy(POOL)).blocks(serving(30), None, 1.0) == 0


def test_what_serving_leaves_is_told_in_the_guests_own_blocks() -> None:
    assert KvBudget(KvPolicy(POOL)).blocks(serving(30), GUEST, 1.0) == 25  # 500 bytes


def test_an_idle_guest_that_says_nothing_keeps_its_budget() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.blocks(serving(30), GUEST, 1.0)
    assert budget.blocks(serving(30), None, 2.0) == 25


def test_what_serving_keeps_besides_its_use_is_not_the_guests() -> None:
    assert KvBudget(KvPolicy(POOL), serving_spare=0.1).blocks(serving(30), GUEST, 1.0) == 20


def test_spare_is_never_more_than_all_of_servings_cache() -> None:
    pool = KvPool(pool_bytes=2000, serving_bytes=1000, guest_bytes=800)
    assert KvBudget(KvPolicy(pool), serving_spare=0.5).blocks(serving(100), GUEST, 1.0) == 30


def test_a_burst_cuts_and_the_end_of_a_step_plans_anew() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.blocks(serving(30), GUEST, 1.0)
    assert budget.blocks(serving(50), GUEST, 2.0) == 12
    assert budget.figures(3.0) == MemoryFigures(250, True, cuts=1, grows=1, freezes=1, turns=1)
    budget.step_ended(4.0)
    assert budget.blocks(serving(30), GUEST, 4.1) == 15


def test_serving_unknown_leaves_the_blocks_for_a_moment() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.blocks(serving(30), GUEST, 1.0)
    assert budget.blocks(None, GUEST, 1.5) == 25
    assert budget.blocks(None, GUEST, 3.0) == 0


def test_a_guest_asleep_gets_none_and_its_budget_goes_on() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.presence = Presence.ASLEEP
    assert budget.blocks(serving(30), GUEST, 1.0) == 0
    budget.presence = Presence.ACTIVE
    assert budget.blocks(serving(30), GUEST, 1.1) == 25


def test_a_fixed_split_is_told_in_blocks_too() -> None:
    budget = KvBudget(FixedSplit(KvPool(pool_bytes=1500, serving_bytes=1000, guest_bytes=800)))
    for used in (0, 90):
        assert budget.blocks(serving(used), GUEST, 1.0) == 25
