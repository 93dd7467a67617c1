"""A guest on GPU whose keys and values kvcached maps page by page: its limit follows the quota.

kvcached maps device memory as blocks are handed out, and unmaps a page when no block on it is used or cached. Its limit
never takes anything from anybody: one below what is in use is only *deferred*. The quota scheduler sets requests back
before it asks here, so what is in use fits; prefixes that nobody uses are evicted where they stand in the way.

Invariants
- A limit is asked for again as long as more is mapped than it allows, in each step, under a new revision: kvcached
  answers a known one without trying.
- kvcached waits for the device before it unmaps under asynchronous scheduling: the fence is its own.
- Whoever else sets limits for this engine is overtaken, by a revision behind theirs. Where that is not taken either,
  `off` says so, and the split is fixed.

Source: kvcached 0.1.6, `kvcached.control.set_instance_memory_limit`, `ElasticBlockPool`. Its pools say how many blocks
may be handed out now, not how many nobody uses; so what is read for that is named in `RELIES_ON`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rose.logs import logger
from rose_executor.kv_backing import Backing, Tell

RELIES_ON = ("page_size", "num_layers", "num_kv_buffers", "reserved_blocks", "_get_num_alloced_blocks")
"""Of a pool's manager; of the pool itself: `evict_blocks`, `kv_block_pool` and `_evictable_blocks`."""

_WHOLE_BYTES = 2**62

log = logger("kv")


class SetLimit(Protocol):
    """`kvcached.control.set_instance_memory_limit`."""

    def __call__(self, limit_bytes: int, *, revision: int) -> Mapping[str, Any]: ...


class KvcachedPages:
    """One engine's `ElasticBlockPool`. `off` says why the limit does not follow, "" while it does."""

    def __init__(self, pool: Any, set_limit: SetLimit) -> None:
        self.off = "its memory has not been asked for yet"
        self.block_bytes = 0
        self._pool = pool
        self._set_limit = set_limit
        self._in_pool: Callable[[], int] = pool.get_num_free_blocks
        self._total: int = pool.num_gpu_blocks - 1
        self._revision = 0
        self._asked_bytes: int | None = None
        self._page_bytes = self._mapped_bytes = self._overage_bytes = 0
        if not self._missing():
            pool.get_num_free_blocks = self.free_blocks

    def attach(self, tell: Tell) -> None:
        """Find out how large its blocks are: a limit beyond all memory comes to all of it."""
        self.off = self._missing()
        if self.off:
            return
        manager = self._pool.kv_cache_manager
        self._page_bytes = manager.page_size * manager.num_layers * manager.num_kv_buffers
        answer = self._ask(_WHOLE_BYTES)
        if not self.off:
            self.block_bytes = int(answer["effective_limit_bytes"]) // self._pool.num_gpu_blocks
            self._asked_bytes = None

    def describe(self) -> Backing:
        if self.off:
            return Backing.fixed(self.off)
        return Backing(
            "kvcached",
            f"pages of {self._page_bytes} bytes are unmapped as soon as no block on them is used",
            "a page is kept for a single block on it; prefixes are forgotten when the limit falls",
        )

    @property
    def holds(self) -> bool:
        """Whether more is mapped than the page of the null block."""
        return not self.off and self._mapped_bytes > self._page_bytes

    @property
    def resident_blocks(self) -> int:
        return self._total if self.off else min(self._total, -(-self._mapped_bytes // self.block_bytes))

    def free_blocks(self) -> int:
        """Blocks that nobody uses, whether there is memory for them now or not."""
        manager = self._pool.kv_cache_manager
        kept = len(manager.reserved_blocks) + len(self._pool._evictable_blocks) + 1  # the null block
        used: int = manager._get_num_alloced_blocks() - kept
        return self._total - max(0, used)

    def available_blocks(self) -> int:
        """Those that there is memory for: a neighbour may have taken it."""
        return self._in_pool()

    def scheduled(self) -> None:
        """Nothing to do: the fence is kvcached's own."""

    def ended(self) -> None:
        """Nothing to do."""

    def settled(self, resident_max: int) -> bool:
        """Whether this limit has been asked for. What requests still use goes back as they end."""
        return bool(self.off) or self._asked_bytes == self._limit_bytes(resident_max)

    def keep_within(self, resident_max: int) -> None:
        """Between two steps, when what is in use fits: let the limit be so many blocks."""
        limit_bytes = self._limit_bytes(resident_max)
        if self.off or (limit_bytes == self._asked_bytes and not self._overage_bytes):
            return
        answer = self._ask(limit_bytes)
        if not self.off and (answer["status"] == "deferred" or self._overage_bytes):
            self._pool.evict_blocks({block.block_id for block in self._pool.kv_block_pool if block.ref_cnt == 0})
            self._ask(limit_bytes)

    def _limit_bytes(self, resident_max: int) -> int:
        return self._page_bytes + resident_max * self.block_bytes

    def _ask(self, limit_bytes: int) -> Mapping[str, Any]:
        self._revision += 1
        answer = self._set_limit(limit_bytes, revision=self._revision)
        if answer["status"] in ("stale", "conflict"):
            # The revisions of an earlier owner of this very engine, say a debugger's: go on behind them, once.
            self._revision = 1 + max(int(pool["revision"]) for pool in answer["pools"])
            answer = self._set_limit(limit_bytes, revision=self._revision)
        if answer["status"] not in ("applied", "deferred"):
            self.off = f"kvcached answers {answer['status']}: {answer['reason']}"
            log.warning("the limit of keys and values does not follow any more", why=self.off)
            return answer
        self._asked_bytes = limit_bytes
        self._mapped_bytes = int(answer["mapped_bytes"])
        self._overage_bytes = int(answer["overage_bytes"])
        return answer

    def _missing(self) -> str:
        lacks = [name for name in RELIES_ON if not hasattr(self._pool.kv_cache_manager, name)]
        lacks += [
            name for name in ("evict_blocks", "kv_block_pool", "_evictable_blocks") if not hasattr(self._pool, name)
        ]
        return f"this kvcached has no {', '.join(lacks)}" if lacks else ""
