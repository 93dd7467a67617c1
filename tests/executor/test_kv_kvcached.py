"""The limit of a guest whose memory kvcached maps: against a fake of its API, and with a GPU against itself."""

from __future__ import annotations

import importlib
import sys
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kvcached_fake import ElasticBlockPool, FakeControl

from rose_executor.kv_backing import pick_kv_backing
from rose_executor.kv_kvcached import RELIES_ON, KvcachedPages
from rose_executor.kv_pages import KvPages

BLOCKS, PER_PAGE = 64, 8


class Guest:
    """A pool, and a scheduler's part: nothing is used beyond the quota when the limit is asked for."""

    def __init__(self) -> None:
        self.pool = ElasticBlockPool(BLOCKS, PER_PAGE)
        self.control = FakeControl(self.pool)
        self.pages = KvcachedPages(self.pool, self.control.set_instance_memory_limit)
        self.pages.attach(lambda *_, **__: [])
        self.bundle_bytes = self.pool.kv_cache_manager.bundle_bytes

    def mapped_pages(self) -> int:
        return len(self.pool.kv_cache_manager._taken)


def test_it_finds_out_how_large_blocks_are() -> None:
    guest = Guest()
    assert guest.pages.off == ""
    assert guest.pages.block_bytes * PER_PAGE == guest.bundle_bytes
    assert guest.pages.describe().name == "kvcached"
    assert guest.pages.free_blocks() == BLOCKS - 1


def test_the_pages_of_an_idle_guest_are_unmapped_at_once() -> None:
    guest = Guest()
    guest.pool.free_blocks(guest.pool.get_new_blocks(40))
    guest.pages.keep_within(0)
    assert guest.pages.settled(0)
    assert not guest.pages.holds
    assert guest.mapped_pages() == 1  # the null block's


def test_a_limit_below_what_is_used_takes_effect_as_soon_as_requests_are_set_back() -> None:
    guest = Guest()
    held = guest.pool.get_new_blocks(40)
    guest.pages.keep_within(8)
    assert guest.pages.settled(8)
    assert guest.mapped_pages() == 6
    guest.pool.free_blocks(held[8:])
    guest.pages.keep_within(8)
    assert guest.mapped_pages() == 2
    assert guest.pages.resident_blocks == 2 * PER_PAGE


def test_prefixes_that_nobody_uses_do_not_stand_in_the_way() -> None:
    guest = Guest()
    held = guest.pool.get_new_blocks(40)
    for block in held:
        block.prefix = True
    guest.pool.free_blocks(held[7:])
    assert guest.mapped_pages() == 6
    guest.pages.keep_within(8)
    assert guest.mapped_pages() == 1
    assert [block.prefix for block in held[:7]] == [True] * 7


def test_a_limit_that_all_fits_evicts_nothing() -> None:
    guest = Guest()
    held = guest.pool.get_new_blocks(8)
    for block in held:
        block.prefix = True
    guest.pool.free_blocks(held)
    guest.pages.keep_within(16)
    assert len(guest.pool._evictable_blocks) == 8


def test_it_asks_again_only_while_more_is_mapped_than_may_be() -> None:
    guest = Guest()
    guest.pages.keep_within(16)
    asked = len(guest.control.asked)
    guest.pages.keep_within(16)
    assert len(guest.control.asked) == asked
    # One block on each of five pages: what is used fits, and the pages do not.
    held = guest.pool.get_new_blocks(23)
    guest.pool.free_blocks([block for block in held if block.block_id % PER_PAGE])
    guest.pages.keep_within(4)
    guest.pages.keep_within(4)
    assert len(guest.control.asked) > asked + 2
    revisions = [revision for _, revision in guest.control.asked]
    assert revisions == sorted(set(revisions))


def test_growth_is_asked_for_at_once() -> None:
    guest = Guest()
    guest.pages.keep_within(8)
    assert guest.pages.available_blocks() < 30
    guest.pages.keep_within(40)
    assert guest.pages.available_blocks() >= 40
    assert len(guest.pool.get_new_blocks(40)) == 40


def test_blocks_that_are_used_are_told_apart_from_memory_that_is_not_there() -> None:
    guest = Guest()
    held = guest.pool.get_new_blocks(10)
    guest.pages.keep_within(16)
    assert guest.pages.free_blocks() == BLOCKS - 1 - 10
    for block in held:
        block.prefix = True
    guest.pool.free_blocks(held[:4])
    assert guest.pages.free_blocks() == BLOCKS - 1 - 6


def test_revisions_of_an_earlier_owner_are_passed() -> None:
    guest = Guest()
    guest.control.set_instance_memory_limit(2**40, revision=700)
    guest.pages.keep_within(8)
    assert guest.pages.off == ""
    assert guest.control.asked[-1][1] == 701
    guest.control.set_instance_memory_limit(2**40, revision=702)
    guest.pages.keep_within(4)
    assert (guest.pages.off, guest.control.asked[-1][1]) == ("", 703)


def test_an_answer_that_is_no_limit_makes_the_split_a_fixed_one_by_name() -> None:
    guest = Guest()
    guest.control.managers.clear()
    guest.pages.keep_within(8)
    assert "no_registered_kv_cache_pool" in guest.pages.off
    assert guest.pages.describe().name == "fixed split"
    assert guest.pages.resident_blocks == BLOCKS - 1
    asked = len(guest.control.asked)
    guest.pages.keep_within(4)
    assert (len(guest.control.asked), guest.pages.settled(4), guest.pages.holds) == (asked, True, False)


def test_a_kvcached_that_lacks_what_is_relied_on_is_not_driven() -> None:
    pool = ElasticBlockPool(BLOCKS, PER_PAGE)
    control = FakeControl(pool)
    pool.kv_cache_manager = SimpleNamespace(**dict.fromkeys(RELIES_ON[:-1]))  # type: ignore[assignment]
    pages = KvcachedPages(pool, control.set_instance_memory_limit)
    pages.attach(lambda *_, **__: [])
    assert pages.off == f"this kvcached has no {RELIES_ON[-1]}"
    assert control.asked == []


@pytest.mark.parametrize("seed", range(20))
def test_with_a_scheduler_that_keeps_its_quota_no_limit_stays_deferred(seed: int) -> None:
    random, guest, quota = Random(seed), Guest(), BLOCKS - 1
    held: list[list[Any]] = []
    for _ in range(300):
        if random.random() < 0.2:
            quota = random.choice((0, 4, 8, 20, BLOCKS - 1))
        while BLOCKS - 1 - guest.pages.free_blocks() > quota:
            guest.pool.free_blocks(held.pop())
        guest.pages.keep_within(quota)
        free = min(quota - (BLOCKS - 1 - guest.pages.free_blocks()), guest.pages.available_blocks())
        assert guest.pool.kv_cache_manager._shrinks_to is None or guest.pages._overage_bytes
        if free > 0 and random.random() < 0.7:
            held.append(guest.pool.get_new_blocks(random.randint(1, free)))
            for block in held[-1]:
                block.prefix = random.random() < 0.5
        if held and random.random() < 0.3:
            guest.pool.free_blocks(held.pop(random.randrange(len(held))))
        assert BLOCKS - 1 - guest.pages.free_blocks() == sum(map(len, held)) <= quota
    while held:
        guest.pool.free_blocks(held.pop())
    guest.pages.keep_within(0)
    assert (guest.mapped_pages(), guest.pages.holds) == (1, False)


def test_a_pool_of_kvcached_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ElasticBlockPool(BLOCKS, PER_PAGE)
    control = ModuleType("kvcached.control")
    control.set_instance_memory_limit = FakeControl(pool).set_instance_memory_limit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvcached", ModuleType("kvcached"))
    monkeypatch.setitem(sys.modules, "kvcached.control", control)
    assert isinstance(pick_kv_backing(pool), KvcachedPages)


def test_any_other_pool_is_vllms() -> None:
    pool = SimpleNamespace(num_gpu_blocks=9, get_num_free_blocks=lambda: 8, get_new_blocks=lambda count: [])
    backing = pick_kv_backing(pool)
    assert isinstance(backing, KvPages)
    assert backing.describe().name == "fixed split"  # until its workers have been asked


@pytest.mark.gpu
def test_kvcached_itself_has_what_is_relied_on() -> None:
    manager = importlib.import_module("kvcached.kv_cache_manager").KVCacheManager
    assert hasattr(manager, "_get_num_alloced_blocks")
    control = importlib.import_module("kvcached.control")
    answer = control.set_instance_memory_limit(0, revision=0)
    assert answer["status"] == "unavailable"
    assert {"reason", "effective_limit_bytes", "mapped_bytes", "overage_bytes", "pools"} <= set(answer)
