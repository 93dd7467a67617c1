"""From blocks of serving to blocks of the guest."""

from __future__ import annotations

from rose_executor.board_states import GuestState, ServingKv, ServingState
from rose_executor.guest_presence import Presence
from rose_executor.kv_budget import FixedBlocks, KvBudget, MemoryFigures
from rose_executor.kv_policy import KvPolicy, KvPool

POOL = KvPool(pool_bytes=1000, serving_bytes=1000, guest_bytes=800)
GUEST = GuestState(kv_blocks_total=40, kv_blocks_resident=30)
"""Of 20 bytes each."""
KV = ServingKv(total_bytes=1000)
"""It gives memory back, and says that it holds none yet."""


def serving(used: int) -> ServingState:
    """Of 100 blocks, 10 bytes each."""
    return ServingState(running=1, kv_blocks_used=used, kv_blocks_total=100)


def test_a_guest_that_never_said_how_many_blocks_it_has_gets_none() -> None:
    assert KvBudget(KvPolicy(POOL)).blocks(serving(30), KV, None, 1.0) == 0


def test_what_serving_leaves_is_told_in_the_guests_own_blocks() -> None:
    assert KvBudget(KvPolicy(POOL)).blocks(serving(30), KV, GUEST, 1.0) == 25  # 500 bytes


def test_an_idle_guest_that_says_nothing_keeps_its_budget() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.blocks(serving(30), KV, GUEST, 1.0)
    assert budget.blocks(serving(30), KV, None, 2.0) == 25


def test_whether_the_guest_gives_memory_back_is_what_it_said_last() -> None:
    budget = KvBudget(KvPolicy(POOL))
    for guest, gives_back in (
        (None, None),
        (GUEST._replace(kv_gives_back=True), True),
        (None, True),  # it is idle, or the next one has not begun
        (GUEST, False),  # it can no more
        (None, False),
    ):
        budget.blocks(serving(30), KV, guest, 1.0)
        assert budget.figures(1.0).gives_back is gives_back


def test_what_serving_keeps_besides_its_use_is_not_the_guests() -> None:
    kept = ServingKv(total_bytes=1000, spare_bytes=100)
    assert KvBudget(KvPolicy(POOL)).blocks(serving(30), kept, GUEST, 1.0) == 20


def test_pages_that_serving_has_not_given_back_yet_are_not_the_guests() -> None:
    kept = ServingKv(total_bytes=1000, resident_bytes=700, spare_bytes=100)
    assert KvBudget(KvPolicy(POOL)).blocks(serving(30), kept, GUEST, 1.0) == 5


def test_spare_is_never_more_than_all_of_servings_cache() -> None:
    pool = KvPool(pool_bytes=2000, serving_bytes=1000, guest_bytes=800)
    kept = ServingKv(total_bytes=1000, spare_bytes=500)
    assert KvBudget(KvPolicy(pool)).blocks(serving(100), kept, GUEST, 1.0) == 30


def test_a_serving_engine_that_gives_nothing_back_holds_its_whole_cache() -> None:
    budget = KvBudget(KvPolicy(KvPool(pool_bytes=1600, serving_bytes=1000, guest_bytes=800)))
    for used in (0, 30, 100):
        assert budget.blocks(serving(used), None, GUEST, 1.0) == 14  # 280 bytes: 1600 less its cache and the headroom


def test_a_pool_that_never_has_room_for_a_request_says_what_to_set() -> None:
    gib = 2**30
    pool = KvPool(pool_bytes=3 * gib // 2, serving_bytes=5 * gib // 4, guest_bytes=gib // 2)
    budget = KvBudget(KvPolicy(pool), request_bytes=gib // 8)
    unfit = (
        "0.0 MiB of the pool are left beside the headroom and the whole cache of serving, which does not say that it "
        "gives memory back, and one request of the guest takes 128.0: set memory.pool_gib to 1.72 or more, or on CPU "
        "ROSE_SERVING_KV_SPARE=0.1 at the serving engine"
    )
    assert budget.figures(0.0).unfit == unfit  # before anybody is seen
    budget.blocks(serving(0), KV, None, 1.0)
    assert budget.figures(1.0).unfit == ""
    budget.blocks(serving(0), None, None, 2.0)  # one that was started again without that
    assert budget.figures(2.0).unfit == unfit
    larger = KvPool(pool_bytes=round(1.72 * gib), serving_bytes=5 * gib // 4, guest_bytes=gib // 2)
    assert KvBudget(KvPolicy(larger), request_bytes=gib // 8).figures(0.0).unfit == ""


def test_a_pool_that_is_too_small_whatever_serving_does_asks_for_a_larger_one_alone() -> None:
    budget = KvBudget(KvPolicy(KvPool(2**27, serving_bytes=2**30, guest_bytes=2**28)), request_bytes=2**28)
    budget.blocks(serving(0), KV, None, 1.0)
    unfit = budget.figures(1.0).unfit
    assert unfit.startswith(
        "102.4 MiB of the pool are left beside the headroom, and one request of the guest takes 256"
    )
    assert unfit.endswith("set memory.pool_gib to 0.32 or more")


def test_a_burst_cuts_and_the_end_of_a_step_plans_anew() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.blocks(serving(30), KV, GUEST, 1.0)
    assert budget.blocks(serving(50), KV, GUEST, 2.0) == 12
    why = "serving uses 500 bytes"
    expected = MemoryFigures(250, 600, True, cuts=1, grows=1, turns=1, cut_why=why, gives_back=False)
    assert budget.figures(3.0) == expected
    budget.step_ended(4.0)
    assert budget.blocks(serving(30), KV, GUEST, 4.1) == 15


def test_serving_unknown_leaves_the_blocks_for_a_moment() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.blocks(serving(30), KV, GUEST, 1.0)
    assert budget.blocks(None, KV, GUEST, 1.5) == 25
    assert budget.blocks(None, KV, GUEST, 3.0) == 0


def test_a_guest_asleep_gets_none_and_its_budget_goes_on() -> None:
    budget = KvBudget(KvPolicy(POOL))
    budget.presence = Presence.ASLEEP
    assert budget.blocks(serving(30), KV, GUEST, 1.0) == 0
    budget.presence = Presence.ACTIVE
    assert budget.blocks(serving(30), KV, GUEST, 1.1) == 25


def test_a_fixed_split_never_moves_but_for_a_guest_asleep() -> None:
    fixed = FixedBlocks(25)
    for used in (0, 90):
        assert fixed.blocks(serving(used), KV, GUEST, 1.0) == 25
    fixed.step_ended(2.0)
    assert (fixed.blocks(None, None, None, 3.0), fixed.figures(3.0)) == (25, None)
    fixed.presence = Presence.GONE
    assert fixed.blocks(serving(0), KV, GUEST, 4.0) == 0


def test_what_blocks_take_is_known_once_the_guest_has_said_how_many_it_has() -> None:
    budget = KvBudget(KvPolicy(POOL))
    assert budget.need_bytes(5) is None
    budget.blocks(serving(30), KV, GUEST, 1.0)
    assert budget.need_bytes(5) == 100
    whole = POOL.guest_bytes
    assert budget.need_bytes(10**6) == whole  # no request takes more than there is
    assert FixedBlocks(25).need_bytes(5) is None
