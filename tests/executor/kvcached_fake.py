"""kvcached's pool, manager and control API, as its source documents them, on memory that is only counted.

Source: kvcached 0.1.6, `control.py`, `kv_cache_manager.py` and `integration/vllm/patches.py`. What is kept: a page is
mapped when the first of its blocks is handed out and unmapped when the last comes back; a limit below what is in use is
deferred, and comes into force when enough blocks came back; revisions; prefixes keep their blocks until evicted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

PAGE = 2 * 2**20


class FakeManager:
    num_layers = 2
    num_kv_buffers = 2
    page_size = PAGE

    def __init__(self, blocks: int, blocks_per_page: int) -> None:
        self.mem_size = blocks // blocks_per_page * PAGE
        self.reserved_blocks: list[int] = []
        self._per_page = blocks_per_page
        self._pages = self._total_pages = blocks // blocks_per_page
        self._taken: dict[int, set[int]] = {}
        self._shrinks_to: int | None = None
        self._limit = (-1, 0, 0)

    @property
    def bundle_bytes(self) -> int:
        return self.page_size * self.num_layers * self.num_kv_buffers

    def _get_num_alloced_blocks(self) -> int:
        return sum(map(len, self._taken.values()))

    def available_size(self) -> int:
        in_pages = len(self._taken) * self._per_page - self._get_num_alloced_blocks()
        free_pages = 0 if self._shrinks_to is not None else max(0, self._total_pages - len(self._taken))
        return in_pages + free_pages * self._per_page

    def alloc(self, count: int) -> list[int]:
        assert count <= self.available_size()
        got: list[int] = []
        candidates = [*sorted(self._taken), *(page for page in range(self._pages) if page not in self._taken)]
        for page in candidates:
            for block in range(page * self._per_page, (page + 1) * self._per_page):
                if len(got) == count:
                    return got
                if block not in self._taken.get(page, ()):
                    self._taken.setdefault(page, set()).add(block)
                    got.append(block)
        return got

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            page = block // self._per_page
            self._taken[page].remove(block)
            if not self._taken[page]:
                del self._taken[page]
        target = self._shrinks_to
        if target is not None and self._get_num_alloced_blocks() <= target * self._per_page:
            self._resize(target)
            self._shrinks_to = None

    def _resize(self, pages: int) -> bool:
        if pages < len(self._taken):
            return False
        self._total_pages = pages
        return True

    def set_memory_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        known, limit, _ = self._limit
        if revision < known:
            return self._state("stale")
        if revision == known:
            return self._state("" if limit == limit_bytes else "conflict")
        pages = min(limit_bytes // self.bundle_bytes, self._pages)
        self._shrinks_to = None if self._resize(pages) else pages
        self._limit = revision, limit_bytes, pages * self.bundle_bytes
        return self._state()

    def _state(self, status: str = "") -> dict[str, Any]:
        revision, limit, effective = self._limit
        mapped = len(self._taken) * self.bundle_bytes
        return {
            "status": status or ("deferred" if self._shrinks_to is not None else "applied"),
            "limit_bytes": limit,
            "effective_limit_bytes": effective,
            "revision": revision,
            "mapped_bytes": mapped,
            "overage_bytes": max(0, mapped - effective),
        }


class ElasticBlockPool:
    """Named as kvcached's: it is known by its name. Block 0 is the null block."""

    def __init__(self, blocks: int, blocks_per_page: int) -> None:
        self.num_gpu_blocks = blocks
        self.kv_block_pool = [SimpleNamespace(block_id=block, ref_cnt=0, prefix=False) for block in range(blocks)]
        self.kv_cache_manager = FakeManager(blocks, blocks_per_page)
        self._evictable_blocks: dict[int, Any] = {}
        assert self.kv_cache_manager.alloc(1) == [0]

    def get_num_free_blocks(self) -> int:
        return self.kv_cache_manager.available_size() + len(self._evictable_blocks)

    def get_new_blocks(self, count: int) -> list[Any]:
        short = count - self.kv_cache_manager.available_size()
        if short > 0:
            self.evict_blocks(set(list(self._evictable_blocks)[:short]))
        blocks = [self.kv_block_pool[number] for number in self.kv_cache_manager.alloc(count)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.prefix:
                self._evictable_blocks[block.block_id] = block
            elif block.ref_cnt == 0:
                self.kv_cache_manager.free([block.block_id])

    def evict_blocks(self, block_ids: set[int]) -> None:
        for number in sorted(block_ids):
            self.kv_block_pool[number].prefix = False
            if self._evictable_blocks.pop(number, None) is not None:
                self.kv_cache_manager.free([number])


class FakeControl:
    """`kvcached.control` of a process with this one pool. `asked` are all limits and revisions."""

    def __init__(self, pool: ElasticBlockPool) -> None:
        self.managers = [pool.kv_cache_manager]
        self.asked: list[tuple[int, int]] = []

    def set_instance_memory_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        assert limit_bytes >= 0
        assert revision >= 0
        self.asked.append((limit_bytes, revision))
        if not self.managers:
            return {
                **dict.fromkeys(("effective_limit_bytes", "mapped_bytes", "overage_bytes"), 0),
                "status": "unavailable",
                "reason": "no_registered_kv_cache_pool",
                "pools": [],
            }
        (manager,) = self.managers
        state = manager.set_memory_limit(limit_bytes, revision=revision)
        reasons = {"deferred": "inuse_capacity_above_limit", "conflict": "revision_reused_with_different_limit"}
        return {**state, "reason": reasons.get(state["status"], ""), "pools": [state]}
