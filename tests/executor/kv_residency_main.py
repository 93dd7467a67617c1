"""A real block pool of vLLM whose free queue keeps prefixes, against a plain one and books of its own: `main.py SEEDS`.

Trajectories take turns at random: each turn finds what is still cached of its prefix, takes new blocks for the rest,
and frees all in the end, kept or not.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from rose_executor.kv_residency import ResidentQueue

BLOCKS = 48


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)
        self.queue = self.pool.free_block_queue = ResidentQueue(self.pool.free_block_queue)
        self.running: dict[str, list[Any]] = {}
        self.lengths: dict[str, int] = {}
        self.kept: dict[str, tuple[int, float]] = {}
        self.now_s = 0.0

    def hash_of(self, name: str, at: int) -> Any:
        """The first two blocks are the group's: trajectories of the same letter share them."""
        owner = name[0] if at < 2 else name
        return make_block_hash_with_group_id(BlockHash(f"{owner}.{at}".encode()), 0)

    def found(self, name: str) -> list[Any]:
        blocks = []
        for at in range(BLOCKS):
            block = self.pool.cached_block_hash_to_block.get_one_block(self.hash_of(name, at))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def turn(self, name: str, length: int) -> int:
        """Begin a turn of so many blocks. Returns how many were found, -1 if there is no room."""
        found = self.found(name)[:length]
        in_use = sum(1 for block in found if block.ref_cnt)
        if length - in_use > self.pool.get_num_free_blocks():
            return -1
        self.pool.touch(found)
        new = self.pool.get_new_blocks(length - len(found))
        assert len({block.block_id for block in (*found, *new)}) == length
        for at, block in enumerate(new, len(found)):
            self.pool._insert_block_hash(self.hash_of(name, at), block, num_tokens=16)
        self.running[name] = [*found, *new]
        self.lengths[name] = length
        return len(found)

    def end(self, name: str, rank: int | None, seconds: float = 100.0) -> None:
        blocks = self.running.pop(name)
        if rank is not None:
            self.queue.keep(name, rank, self.now_s + seconds, blocks)
        self.pool.free_blocks(reversed(blocks))

    def check(self) -> None:
        in_use = {block.block_id for blocks in self.running.values() for block in blocks}
        free = [block.block_id for block in self.queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == self.queue.num_free_blocks == self.pool.get_num_free_blocks()
        assert in_use.isdisjoint(free)
        assert len(in_use) + len(free) == BLOCKS
        assert self.queue.kept_free_blocks <= self.queue.num_free_blocks
        for name, kept in self.queue._kept.items():
            assert kept.blocks, f"{name} is kept without a block"
            # What is kept is still what it was: nobody has computed anything else there.
            for at, (block_id, block) in enumerate(kept.blocks.items()):
                assert (block.block_id, block.block_hash) == (block_id, self.hash_of(name, at))
        assert set(self.queue._names) == {one for kept in self.queue._kept.values() for one in kept.blocks}


def at_random(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.now_s += world.random.random()
        name = world.random.choice("abc") + str(world.random.randrange(6))
        match world.random.randrange(6):
            case 0 | 1 | 2 if name not in world.running:
                world.turn(name, world.lengths.get(name, 2) + world.random.randrange(4))
            case 3 | 4 if world.running:
                going = world.random.choice(sorted(world.running))
                world.end(going, world.random.choice((None, 1, 2, 3)), world.random.choice((2.0, 100.0)))
                if world.lengths[going] > 14:
                    del world.lengths[going]
            case 5:
                world.queue.forget([name, "nobody"])
            case _:
                world.queue.expire(world.now_s)
        world.check()
    for name in sorted(world.running):
        world.end(name, None)
    world.check()
    world.queue.forget_all()
    assert (world.queue.kept_names, world.queue.kept_free_blocks) == (0, 0)
    assert world.pool.reset_prefix_cache()


def the_least_important_goes_first() -> None:
    world = World(0)
    for name, rank in (("a0", 1), ("b0", 3), ("c0", 2)):
        assert world.turn(name, 12) == 0
        world.end(name, rank)
    assert world.turn("d0", 12) == 0  # all that is plain
    world.end("d0", None)
    assert world.turn("e0", 12) == 0  # instead of d0, which was used last
    assert [len(world.found(name)) for name in ("a0", "b0", "c0", "d0")] == [12, 12, 12, 0]
    assert world.turn("f0", 4) == 0
    assert [len(world.found(name)) for name in ("a0", "b0", "c0")] == [12, 8, 12], "from the end of its prefix on"
    assert world.turn("g0", 12) == 0
    assert [len(world.found(name)) for name in ("a0", "b0", "c0")] == [12, 0, 8]
    assert world.turn("h0", 20) == 0
    assert world.queue.num_free_blocks == 0
    world.check()


def what_is_shared_stays_with_the_last() -> None:
    world = World(0)
    world.turn("a0", 6)
    world.end("a0", 1)
    assert world.turn("a1", 6) == 2
    world.end("a1", 9)
    assert world.turn("b0", BLOCKS - 6) == 0
    assert [len(world.found(name)) for name in ("a0", "a1")] == [6, 2]
    world.check()


def what_is_over_goes_before_all_others() -> None:
    world = World(0)
    world.turn("a0", 10)
    world.end("a0", 1)
    world.turn("b0", 10)
    world.end("b0", None)
    world.queue.forget(["a0"])
    assert world.turn("c0", BLOCKS - 10) == 0
    assert [len(world.found(name)) for name in ("a0", "b0")] == [0, 10]
    world.now_s = 1000.0
    world.turn("b0", 10)
    world.end("b0", 1, seconds=1.0)
    world.queue.expire(1000.5)
    assert world.queue.kept_names == 1
    world.queue.expire(1001.0)
    assert world.queue.kept_names == 0
    world.check()


if __name__ == "__main__":
    the_least_important_goes_first()
    what_is_shared_stays_with_the_last()
    what_is_over_goes_before_all_others()
    for seed in range(int(sys.argv[1])):
        at_random(seed)
