"""The queue that keeps prefixes, over a plain one that is a list: which name goes, and that none is left behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from rose_executor import kv_residency
from rose_executor.kv_residency import ResidentQueue


@dataclass
class Block:
    block_id: int


class Plain:
    """As much of vLLM's free queue as is asked for."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = list(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.blocks)

    def popleft_n(self, count: int) -> list[Block]:
        taken, self.blocks = self.blocks[:count], self.blocks[count:]
        assert len(taken) == count
        return taken

    def append_n(self, blocks: Iterable[Block]) -> None:
        self.blocks.extend(blocks)

    def prepend_n(self, blocks: Iterable[Block]) -> None:
        self.blocks[:0] = blocks

    def remove(self, block: Block) -> None:
        self.blocks.remove(block)

    def get_all_free_blocks(self) -> list[Block]:
        return list(self.blocks)


def queue(blocks: int) -> ResidentQueue:
    return ResidentQueue(Plain(map(Block, range(blocks))))


def kept(own: ResidentQueue, name: str, blocks: int, rank: int = 0, until_s: float = 9.0) -> list[Block]:
    """Blocks that are kept, and in nobody's use any more."""
    taken = own.popleft_n(blocks)
    own.keep(name, rank, until_s, taken)
    own.append_n(taken)
    return taken


def test_a_block_that_is_listed_twice_is_kept_once_and_handed_out_once() -> None:
    own = queue(8)
    first, second = own.popleft_n(2)
    own.keep("x", 0, 9.0, [first, second, second])
    own.append_n([first, second])
    assert (own.num_free_blocks, own.kept_free_blocks) == (8, 2)
    handed_out = own.popleft_n(8)
    assert sorted(block.block_id for block in handed_out) == list(range(8))
    assert handed_out[-2:] == [second, first]
    own.prepend_n([second])
    assert (own.num_free_blocks, own.kept_names) == (1, 0)


def test_of_those_of_one_rank_the_one_goes_whose_time_is_over_first() -> None:
    own = queue(6)
    late, soon, later = (kept(own, str(until_s), 2, until_s=until_s) for until_s in (7.0, 5.0, 9.0))
    assert own.popleft_n(2) == soon[::-1]
    assert own.popleft_n(2) == late[::-1]
    assert own.popleft_n(2) == later[::-1]


def test_a_higher_rank_goes_before_one_whose_time_is_over_earlier() -> None:
    own = queue(4)
    kept(own, "dear", 2, rank=1, until_s=1.0)
    cheap = kept(own, "cheap", 2, rank=2, until_s=9.0)
    assert own.popleft_n(2) == cheap[::-1]


def test_names_are_bounded_and_the_least_important_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_residency, "NAMES_MAX", 3)
    own = queue(9)
    cheap = kept(own, "cheap", 2, rank=9)
    for name in ("a", "b"):
        kept(own, name, 2, rank=1)
    assert (own.kept_names, own.kept_free_blocks) == (3, 6)
    kept(own, "c", 1, rank=5)
    assert (own.kept_names, own.kept_free_blocks) == (3, 5)
    assert own.popleft_n(2) == cheap[::-1]
    # One that is kept again takes no second place.
    kept(own, "c", 0)
    for _ in range(3):
        own.keep("a", 1, 9.0, [Block(100)])
    assert own.kept_names == 2


def test_what_has_no_prefix_in_it_any_more_is_in_no_name() -> None:
    own = queue(4)
    first, second = own.popleft_n(2)
    own.keep("x", 0, 9.0, [first, second])
    own.keep("y", 0, 9.0, [second])
    own.prepend_n([second])
    assert own.kept_names == 1
    own.prepend_n([first])
    assert own.kept_names == 0
    assert own.popleft_n(2) == [first, second]
    own.append_n([first, second])
    assert (own.num_free_blocks, own.kept_free_blocks) == (4, 0)
