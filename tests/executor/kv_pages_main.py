"""A real block pool of vLLM over real memory, its free blocks given back and needed again at random: `main.py SEEDS`.

Each block in use, and each that a prefix is cached in, has its own pattern in it, which must stay. A step that is under
way writes to every block that was in use when it was scheduled, however late it ends.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.interface import PauseState

from rose_executor import kv_pages, kv_serving
from rose_executor.board import SERVING_KV, BoardReader, claim_quota
from rose_executor.kv_pages import KvPages
from rose_executor.kv_tensors import give_back_runs

BLOCKS = 60


class World:
    def __init__(self, seed: int, *, kept: bool = True) -> None:
        self.random = Random(seed)
        mapping = mmap.mmap(-1, (BLOCKS + 1) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = torch.frombuffer(mapping, dtype=torch.int16).view(BLOCKS + 1, -1)
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[self.memory]))
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=32)
        if kept:
            # Small enough that what a step may do is a bound that matters.
            self.pages = KvPages(self.pool, taken_per_step=16)
            self.pages.attach(self.tell)
            assert self.pages.off == ""
        self.held: list[list[Any]] = []
        self.under_way: deque[set[int]] = deque()
        self.quota = BLOCKS
        self.hashes = 0

    def tell(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        if function is give_back_runs:
            going = {block for first, count in args[0] for block in range(first, first + count)}
            assert going.isdisjoint(self.in_use()), "pages of a block in use go back"
            for step in self.under_way:
                assert going.isdisjoint(step), "pages go back while a step may write to them"
        return [function(self.worker, *args)]

    def in_use(self) -> set[int]:
        return {block.block_id for blocks in self.held for block in blocks}

    def write(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.memory[block_id].fill_(block_id + 1)

    def allocate(self) -> None:
        used = len(self.in_use())
        free = min(self.pool.get_num_free_blocks(), self.quota - used)
        if free <= 0:
            return
        count = self.random.randint(1, free)
        before = self.pages.resident_blocks
        blocks = self.pool.get_new_blocks(count)
        assert len({block.block_id for block in blocks} - self.in_use()) == count
        assert self.pages.resident_blocks <= max(before, self.quota), "more is resident than may be"
        self.held.append(blocks)
        self.write({block.block_id for block in blocks})

    def cache(self) -> None:
        """One request's blocks are full: their prefixes can be found from now on."""
        for block in self.random.choice(self.held) if self.held else []:
            if block.block_hash is None:
                self.hashes += 1
                key = make_block_hash_with_group_id(BlockHash(self.hashes.to_bytes(32, "big")), 0)
                self.pool._insert_block_hash(key, block, num_tokens=32)

    def hit(self) -> None:
        """A request finds a prefix in blocks that nobody uses, and does not need new ones."""
        cached = [block for block in self.pool.blocks if block.block_hash is not None and block.ref_cnt == 0]
        if cached and len(self.in_use()) < self.quota:
            block = self.random.choice(cached)
            self.pool.touch([block])
            self.held.append([block])

    def free(self) -> None:
        if self.held:
            self.pool.free_blocks(self.held.pop(self.random.randrange(len(self.held))))

    def schedule(self) -> None:
        if len(self.under_way) < 2:
            self.under_way.append(self.in_use())
            self.pages.scheduled()

    def end(self) -> None:
        if self.under_way:
            # What is in other hands by now is written after this by a later step: vLLM orders that.
            self.write(self.under_way.popleft())
            self.pages.ended()

    def cut(self) -> None:
        self.quota = self.random.choice((0, 5, 20, BLOCKS))
        while len(self.in_use()) > self.quota:
            self.free()
        self.pages.keep_within(self.quota)

    def reset(self) -> None:
        emptied = self.pool.reset_prefix_cache()
        assert emptied == (not self.in_use()), "the prefix cache can be emptied whenever nothing is in use"

    def run(self, steps: int) -> None:
        moves = (self.allocate, self.allocate, self.cache, self.hit, self.free, self.schedule, self.end, self.cut)
        for _ in range(steps):
            self.random.choice(moves)()
            if self.random.random() < 0.3:
                self.pages.keep_within(self.quota)
            if self.random.random() < 0.02:
                self.reset()
            self.check()
        while self.under_way:
            self.end()
        while not self.pages.settled(self.quota):
            self.pages.keep_within(self.quota)
        assert self.pages.resident_blocks <= max(self.quota, len(self.in_use()))
        while self.held:
            self.free()
        assert self.pool.get_num_free_blocks() == BLOCKS
        assert self.pool.get_usage() == 0.0
        self.pages.keep_within(0)
        assert len(self.pool.get_new_blocks(BLOCKS)) == BLOCKS, "free blocks are refused"

    def check(self) -> None:
        used = self.in_use()
        assert self.pool.get_num_free_blocks() == BLOCKS - len(used), "a block kept aside does not count as free"
        cached = {block.block_id for block in self.pool.blocks if block.block_hash is not None}
        wrong = [block_id for block_id in used | cached if not bool((self.memory[block_id] == block_id + 1).all())]
        assert not wrong, f"blocks {wrong} lost what was in them"


def spare(seed: int) -> None:
    """As a serving engine: no free block is refused, growth costs no prefix, and a bounded part stays resident."""
    world, spare = World(seed), 7
    moves = (world.allocate, world.cache, world.hit, world.free, world.schedule, world.end)
    for _ in range(400):
        move = world.random.choice(moves)
        prefixes = {block.block_id for block in world.pool.blocks if block.block_hash is not None}
        bare = len(world.pages._bare)
        before = len(world.in_use())
        move()
        if move == world.allocate and len(world.in_use()) - before <= bare:
            assert prefixes == {block.block_id for block in world.pool.blocks if block.block_hash is not None}
        if world.random.random() < 0.3:
            world.pages.keep_spare(spare)
        world.check()
    while world.under_way:
        world.end()
    while not world.pages.settled(world.pages.spare_max(spare)):
        world.pages.keep_spare(spare)
    assert world.pages.resident_blocks <= min(BLOCKS, len(world.in_use()) + spare)
    world.pages.release()
    assert (
        world.pool.free_block_queue.num_free_blocks == world.pool.get_num_free_blocks() == BLOCKS - len(world.in_use())
    )


def refusing() -> None:
    """A kernel that refuses once ends it: every block is in the pool again, and nothing is asked any more."""
    world = World(0)
    asked = []

    def refuse(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        asked.append(function)
        return ["", "the kernel keeps them"]

    world.pages._tell = refuse
    world.pages.keep_within(10)
    world.pages.keep_within(5)
    assert world.pages.off == "the kernel keeps them"
    assert len(asked) == 1
    assert (world.pages.resident_blocks, world.pages.holds, world.pages.settled(0)) == (BLOCKS, False, True)
    assert world.pool.free_block_queue.num_free_blocks == BLOCKS


class Core:
    """As much of an engine core as a keeper asks for, over a real pool and real memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        self.scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(block_pool=world.pool),
            schedule=lambda: SimpleNamespace(total_num_scheduled_tokens=1),
            update_from_output=lambda output: "outputs",
            has_requests=lambda: False,
            pause_state=PauseState.UNPAUSED,
        )
        self.refusal = ""

    def collective_rpc(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        if self.refusal:
            raise OSError(self.refusal)
        return self.world.tell(function, args)

    def is_running(self) -> bool:
        return True

    def step(self) -> None:
        assert self.scheduler.update_from_output(self.scheduler.schedule()) == "outputs"


def served(refusal: str, folder: Path) -> Core:
    """A serving engine whose pages go back from step to step, until the kernel refuses, if it does."""
    world = World(1, kept=False)
    board = folder / f"board{len(refusal)}"
    claim_quota(board).close()
    core = Core(world)
    keeper = kv_serving.ServingKvKeeper(core, 0.1, board)
    keeper.hook()
    assert core.scheduler.has_requests(), "an idle engine takes steps until its pages are back"
    core.step()
    said = BoardReader(board).read_of_living(SERVING_KV, time.monotonic()).state
    assert said is not None
    assert said.total_bytes == BLOCKS * mmap.PAGESIZE
    core.refusal = refusal
    for _ in range(40):
        core.step()
        held = world.pool.get_new_blocks(world.random.randint(1, world.pool.get_num_free_blocks()))
        core.step()
        world.pool.free_blocks(held)
    while not refusal and core.scheduler.has_requests():
        core.step()
    assert keeper.off == refusal
    assert (BoardReader(board).read_of_living(SERVING_KV, time.monotonic()).state is None) == bool(refusal)
    return core


def serving(folder: Path) -> None:
    assert served("", folder).world.pool.free_block_queue.num_free_blocks == round(0.1 * BLOCKS)
    core = served("no more", folder)
    assert core.world.pool.free_block_queue.num_free_blocks == BLOCKS
    assert not core.scheduler.has_requests()


def unattached() -> None:
    """Before anybody was asked, nothing is taken aside."""
    pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=32)
    pages = KvPages(pool)
    pages.keep_within(0)
    assert pool.free_block_queue.num_free_blocks == BLOCKS
    assert len(pool.get_new_blocks(BLOCKS)) == BLOCKS


if __name__ == "__main__":
    kv_pages._PIECE_BYTES = 4 * mmap.PAGESIZE
    for seed in range(int(sys.argv[1])):
        World(seed).run(400)
        spare(seed)
    refusing()
    unattached()
    with tempfile.TemporaryDirectory() as folder:
        serving(Path(folder))
