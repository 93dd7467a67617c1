"""What a scheduler keeps of the requests that it frees: the mix-in over a stand-in for vLLM's, a real pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from rose_executor import residing
from rose_executor.keep_prefix import Keep
from rose_executor.kept_kv import rekey
from rose_executor.residing import Residing

BLOCKS = 32
KEPT = Keep("trajectory", 1, 60.0)
ANSWERED = RequestStatus.FINISHED_STOPPED


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class OtherPool(BlockPool):  # type: ignore[misc]
    """As kvcached's: one of vLLM's in all but its name."""


class Plain:
    """As much of vLLM's scheduler as the mix-in touches."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.connector = None
        self.running: list[Any] = []
        self.held: dict[str, tuple[list[Any], ...]] = {}
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool, get_blocks=lambda request_id: SimpleNamespace(blocks=self.held[request_id])
        )
        self.emptied = True

    def _free_request(self, request: Any) -> str:
        self.pool.free_blocks(block for group in self.held.pop(request.request_id) for block in reversed(group))
        return "freed"

    def reset_prefix_cache(self) -> bool:
        return self.emptied


class Scheduler(Residing, Plain):
    def __init__(self, pool: type[Any] = BlockPool) -> None:
        super().__init__(pool(BLOCKS + 1, enable_caching=True, hash_block_size=16))
        self.asked = 0

    @property
    def kept(self) -> tuple[int, int]:
        """Names, and the blocks that are kept."""
        queue: Any = self.pool.free_block_queue
        return queue.kept_names, queue.kept_free_blocks

    def begin(self, hashed: Sequence[int] = (2,), extra: int = 1) -> Any:
        """A request with so many full blocks in each group, and others that are not full."""
        self.asked += 1
        name = f"request-{self.asked}"
        groups = []
        for group, full in enumerate(hashed):
            blocks = self.pool.get_new_blocks(full + extra)
            for at, block in enumerate(blocks[:full]):
                key = make_block_hash_with_group_id(BlockHash(f"{name}.{at}".encode()), group)
                self.pool._insert_block_hash(key, block, num_tokens=16)
            groups.append(blocks)
        self.held[name] = tuple(groups)
        return SimpleNamespace(request_id=name, cache_salt=None, block_hashes=[b"old"], sampling_params=None)

    def end(self, request: Any, keep: Keep | None = KEPT, status: Any = ANSWERED, salt: str | None = None) -> None:
        if keep is not None:
            request.sampling_params = SimpleNamespace(extra_args=keep.extra_args())
        request.status, request.cache_salt = status, salt
        assert self._free_request(request) == "freed"


def only_what_was_answered_to_its_end_is_kept() -> None:
    for status in RequestStatus:
        scheduler = Scheduler()
        scheduler.end(scheduler.begin(), status=status)
        answered = status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        assert scheduler.kept == ((1, 2) if answered else (0, 0)), status
        assert scheduler.pool.get_num_free_blocks() == BLOCKS


def only_full_blocks_of_vllms_own_are_kept_of_every_group() -> None:
    scheduler = Scheduler()
    request = scheduler.begin((3, 2), extra=2)
    scheduler.held[request.request_id][0].insert(0, scheduler.pool.null_block)
    scheduler.end(request)
    assert scheduler.kept == (1, 5)


def who_says_nothing_is_not_kept_and_may_forget_others() -> None:
    scheduler = Scheduler()
    scheduler.end(scheduler.begin(), keep=None)
    assert scheduler.kept == (0, 0)
    scheduler.end(scheduler.begin())
    scheduler.end(scheduler.begin(), Keep(forget=(KEPT.name,)), RequestStatus.FINISHED_ABORTED)
    assert scheduler.kept == (0, 0)


def what_is_found_by_one_request_alone_is_not_kept() -> None:
    scheduler = Scheduler()
    scheduler.end(scheduler.begin(), salt="7 request-1")
    assert scheduler.kept == (0, 0)


def what_is_out_of_time_is_forgotten_when_the_next_one_ends() -> None:
    clock = Clock()
    residing.time = clock  # type: ignore[assignment]
    scheduler = Scheduler()
    scheduler.end(scheduler.begin(), Keep("one", 1, 4.2))
    scheduler.end(scheduler.begin(), Keep("two", 1, 50.0))
    clock.now_s += 4.0
    scheduler.end(scheduler.begin(), None)
    assert scheduler.kept == (2, 4)
    clock.now_s += 0.5
    scheduler.end(scheduler.begin(), None)
    assert scheduler.kept == (2, 4), "they are looked through once a second"
    clock.now_s += 0.5
    scheduler.end(scheduler.begin(), None)
    assert scheduler.kept == (1, 2)


def nothing_is_kept_over_a_reset_of_the_cache() -> None:
    scheduler = Scheduler()
    scheduler.end(scheduler.begin())
    scheduler.emptied = False
    assert not scheduler.reset_prefix_cache()
    assert scheduler.kept == (1, 2)
    scheduler.emptied = True
    assert scheduler.reset_prefix_cache()
    assert scheduler.kept == (0, 0)
    assert scheduler.pool.get_num_free_blocks() == BLOCKS


def nothing_is_kept_over_a_new_version_whose_requests_go_on() -> None:
    scheduler = Scheduler()
    scheduler.end(scheduler.begin())
    running = scheduler.begin()
    scheduler.running.append(running)
    assert rekey(scheduler, 7) == ""
    assert scheduler.kept == (0, 0)
    assert all(block.block_hash is None for block in scheduler.pool.blocks)
    assert running.cache_salt == f"7 {running.request_id}"
    assert running.block_hashes != [b"old"]
    scheduler.connector = "elsewhere"  # type: ignore[assignment]
    assert "connector" in rekey(scheduler, 8)


def a_pool_that_is_not_vllms_own_keeps_its_order() -> None:
    scheduler = Scheduler(OtherPool)
    assert type(scheduler.pool.free_block_queue) is type(OtherPool(2, True, 16).free_block_queue)
    scheduler.end(scheduler.begin())
    assert scheduler.reset_prefix_cache()
    assert rekey(scheduler, 7) == ""
    assert scheduler.pool.get_num_free_blocks() == BLOCKS


if __name__ == "__main__":
    only_what_was_answered_to_its_end_is_kept()
    only_full_blocks_of_vllms_own_are_kept_of_every_group()
    who_says_nothing_is_not_kept_and_may_forget_others()
    what_is_found_by_one_request_alone_is_not_kept()
    nothing_is_kept_over_a_reset_of_the_cache()
    nothing_is_kept_over_a_new_version_whose_requests_go_on()
    a_pool_that_is_not_vllms_own_keeps_its_order()
    what_is_out_of_time_is_forgotten_when_the_next_one_ends()
