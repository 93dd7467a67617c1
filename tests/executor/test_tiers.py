"""The tiers by name: what each is made of, and what each says of its cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_executor.board_states import ServingKv, ServingState
from rose_executor.kv_budget import MemoryFigures
from rose_executor.partition_terms import Partition
from rose_executor.tiers import FIXED_SPLIT, Memory, Tier, memory_now, never_told, tier_now

HELD = Partition("a group", "binds", "caches are shared", 0.1, holds=True)
LOOSE = Partition("time slices", "nothing", "a step beside it is twice as long", 1.0, holds=False)
ELASTIC = Memory("madvise", elastic=True)
NEW = ServingState(kv_blocks_total=100)
TOLD = ServingState(steps=5, stepped_at_s=9.0, arrivals=3)
COARSE = ServingState(steps=5, stepped_at_s=9.0)
SCRAPED = ServingState(steps=5, looked_at_s=9.0)


@pytest.mark.parametrize(
    ("serving", "partition", "memory", "tier", "words"),
    [
        (None, HELD, ELASTIC, Tier.UNSEEN, ["computes nothing"]),
        (SCRAPED, HELD, ELASTIC, Tier.OBSERVE, ["scraped", "as late as the next look", "ROSE_SERVING_BOARD"]),
        (TOLD, LOOSE, ELASTIC, Tier.BOARD, ["as it comes", "partition time slices: a step beside it"]),
        (TOLD, HELD, FIXED_SPLIT, Tier.BOARD, ["as it comes", "KV memory fixed split: "]),
        (COARSE, LOOSE, FIXED_SPLIT, Tier.BOARD, ["one step coarser; VLLM_PLUGINS=rose_probe", "time slices", "fixed"]),
        (TOLD, HELD, ELASTIC, Tier.FULL, ["as it comes", "held by a group", "by madvise"]),
        (COARSE, HELD, ELASTIC, Tier.FULL, ["one step coarser"]),
        (NEW, HELD, ELASTIC, Tier.FULL, ["no request has come"]),
    ],
)
def test_a_tier_is_what_is_there(
    serving: ServingState | None, partition: Partition, memory: Memory, tier: Tier, words: list[str]
) -> None:
    now = tier_now(serving, partition, memory)
    assert now.tier is tier
    for word in words:
        assert word in now.words


@pytest.mark.parametrize(
    ("pooled", "serving_kv", "gives_back", "name"),
    [
        (False, ServingKv(), True, "fixed split"),
        (True, None, True, "fixed split, because serving gives none back"),
        (True, ServingKv(), False, "fixed split, because the guest gives none back"),
        (True, ServingKv(), None, "fixed split, until the guest says that it gives memory back"),
        (True, ServingKv(), True, "shared pool"),
    ],
)
def test_memory_is_elastic_where_both_give_it_back_and_the_guest_says_so(
    pooled: bool, serving_kv: ServingKv | None, gives_back: bool | None, name: str
) -> None:
    pool = MemoryFigures(250, 600, False, cuts=0, grows=0, turns=0, cut_why="", gives_back=gives_back)
    memory = memory_now(pool if pooled else None, serving_kv)
    assert memory == Memory(name, elastic=name == "shared pool")
    assert tier_now(TOLD, HELD, memory).tier is (Tier.FULL if memory.elastic else Tier.BOARD)


def test_no_tier_names_a_cost_that_is_not_there() -> None:
    assert "fixed" not in tier_now(TOLD, LOOSE, ELASTIC).words
    assert "time slices" not in tier_now(TOLD, LOOSE, ELASTIC).words.partition("partition ")[0]
    assert "a group" not in tier_now(TOLD, HELD, FIXED_SPLIT).words
    assert "coarser" not in tier_now(TOLD, HELD, ELASTIC).words


def test_why_serving_is_unseen_is_told_where_it_is_known() -> None:
    assert tier_now(None, HELD, ELASTIC, "it answers 503").words.endswith(": it answers 503")
    why = never_told("the serving half was never written", Path("/dev/shm/board"))
    words = "never written; start it with ROSE_SERVING_BOARD=/dev/shm/board, or name its page as [serving] metrics"
    assert tier_now(None, HELD, ELASTIC, why).words.endswith(words)
    assert "503" not in tier_now(SCRAPED, HELD, ELASTIC, "it answers 503").words
