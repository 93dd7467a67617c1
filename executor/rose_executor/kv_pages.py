"""The free blocks of a vLLM block pool whose pages went back: kept aside, and brought in again as they are needed.

    free in the pool ──▶ aside, fenced ──▶ aside, bare
         ▲                    │  pages are there   │  pages went back
         └── needed ◀─────────┴────────────────────┘

A block that is kept aside is free: `free_blocks` counts it, and who asks the pool for new blocks gets it. So taking
blocks aside refuses nobody anything; it decides which of the free blocks have pages. Those that are taken are the ones
that the pool would have handed out next, so prefixes are forgotten in the pool's own order.

Invariants
- Pages of a block go back only when no step that was scheduled while it was in use is still under way. A step of vLLM's
  asynchronous scheduling may write to a block that was freed after it had been scheduled.
- A block kept aside holds no prefix and is in nobody's hands. Bringing blocks in never makes more of them resident than
  `resident_max`, except where what was asked for cannot be had otherwise.
- What a step spends on this is bounded: so many blocks taken aside, so much time for pages to go back.

What it takes for granted of vLLM: a pool hands blocks out in one method, and a freed one without a prefix is the next.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rose.logs import logger
from rose_executor.kv_backing import Backing, Tell
from rose_executor.kv_tensors import Run, find_kv_memory, give_back_runs, runs_of

TAKEN_PER_STEP = 4096
GIVING_S_PER_STEP = 0.02
IDLE_KEEPS_S = 2.0
_PIECE_BYTES = 16 * 2**20

log = logger("kv")


class Idleness:
    """For how long an engine has had no requests. It begins as one that has nothing worth keeping."""

    def __init__(self) -> None:
        self._since_s: float | None = -math.inf

    def saw(self, requests: int, now_s: float) -> None:
        if requests:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def lasts(self, now_s: float) -> bool:
        """Whether it is idle for so long that cached prefixes are kept no more."""
        return self._since_s is not None and now_s - self._since_s >= IDLE_KEEPS_S


@dataclass(slots=True)
class _Fenced:
    """Blocks that were free when `after_steps` steps had been scheduled."""

    after_steps: int
    blocks: list[Any]


class KvPages:
    """Takes over a pool's `get_new_blocks` and `get_num_free_blocks`.

    `off` says why no pages go back, "" while they do.
    Until it is attached to workers nothing is taken aside. `resident_max` is in blocks.
    """

    def __init__(
        self, pool: Any, taken_per_step: int = TAKEN_PER_STEP, giving_s_per_step: float = GIVING_S_PER_STEP
    ) -> None:
        self.off = "no worker was asked yet"
        self.resident_max: int = pool.num_gpu_blocks - 1
        self.block_bytes = 0
        self._taken_per_step = taken_per_step
        self._giving_s_per_step = giving_s_per_step
        self._pool = pool
        self._total: int = pool.num_gpu_blocks - 1
        self._free_in_pool: Callable[[], int] = pool.get_num_free_blocks
        self._take: Callable[[int], list[Any]] = pool.get_new_blocks
        self._fenced: deque[_Fenced] = deque()
        self._bare: list[Any] = []
        self._scheduled = self._ended = 0
        self._tell: Tell | None = None
        pool.get_new_blocks = self._new_blocks
        pool.get_num_free_blocks = self.free_blocks

    def attach(self, tell: Tell) -> None:
        """Ask the workers where their blocks lie; no step is under way."""
        answers: list[tuple[int, str]] = tell(find_kv_memory, args=(self._pool.num_gpu_blocks,))
        self.off = next((why for _, why in answers if why), "")
        self.block_bytes = sum(block_bytes for block_bytes, _ in answers)
        self._tell = tell

    def describe(self) -> Backing:
        if self.off:
            return Backing.fixed(self.off)
        return Backing(
            "madvise",
            f"whole pages of free blocks, {self.block_bytes} bytes each, a step after they were last in use",
            "a block that comes back is zeroed by the kernel at its first touch; prefixes are forgotten first",
        )

    @property
    def resident_blocks(self) -> int:
        """Blocks whose pages may be there."""
        return self._total - len(self._bare)

    @property
    def holds(self) -> bool:
        """Whether there are pages that could go back."""
        return not self.off and self.resident_blocks > 0

    @property
    def resident_bytes(self) -> int:
        return self.resident_blocks * self.block_bytes

    def settled(self, resident_max: int) -> bool:
        """Whether nothing has to go back for at most so many blocks to be resident."""
        return bool(self.off) or (not self._fenced and self._excess(resident_max) <= 0)

    def free_blocks(self) -> int:
        """Blocks that nobody uses, those kept aside among them."""
        return self._free_in_pool() + self._aside()

    # Who asks the pool gets those kept aside as well.
    available_blocks = free_blocks

    def scheduled(self) -> None:
        """A step that computes something was scheduled."""
        self._scheduled += 1

    def ended(self) -> None:
        """The oldest of those is over."""
        self._ended += 1

    def keep_within(self, resident_max: int) -> None:
        """Between two steps: let pages go until at most so many blocks are resident, and those in use."""
        self.resident_max = resident_max
        if self.off:
            return
        excess = min(self._excess(resident_max), self._taken_per_step)
        if excess > 0:
            self._fenced.append(_Fenced(self._scheduled, sorted(self._taken(excess), key=_block_id)))
        self._give_back()

    def keep_spare(self, spare: int) -> None:
        """Between two steps: let pages go until at most so many blocks are resident beyond those in use.

        New blocks are never had by forgetting prefixes: there are pages for all of them.
        """
        self.keep_within(self.spare_max(spare))
        self.resident_max = self._total

    def spare_max(self, spare: int) -> int:
        """How many blocks are resident with so many beyond those in use."""
        return min(self._total, self._total - self.free_blocks() + spare)

    def release(self) -> None:
        """Give the pool back as it was, all blocks in it."""
        self.off = self.off or "it was released"
        self._bring_in(self._aside())
        self._pool.get_new_blocks = self._take
        self._pool.get_num_free_blocks = self._free_in_pool

    def _aside(self) -> int:
        if not self._fenced:
            return len(self._bare)
        return len(self._bare) + sum(len(fenced.blocks) for fenced in self._fenced)

    def _excess(self, resident_max: int) -> int:
        """How many of the pool's free blocks are to be taken aside."""
        return min(self._total - self._aside() - resident_max, self._free_in_pool())

    def _taken(self, count: int) -> list[Any]:
        """The pool asks itself how many it may hand out; a quota's answer is not meant here."""
        answer = self._pool.get_num_free_blocks
        self._pool.get_num_free_blocks = self._free_in_pool
        try:
            return self._take(count)
        finally:
            self._pool.get_num_free_blocks = answer

    def _new_blocks(self, count: int) -> list[Any]:
        missing = count - self._free_in_pool()
        within = min(count, self.resident_max - (self._total - self._aside()))
        self._bring_in(max(missing, within))
        return self._take(count)

    def _bring_in(self, count: int) -> None:
        """Put blocks before all others in the pool, those that still have their pages first."""
        while count > 0 and self._aside():
            source = self._fenced[-1].blocks if self._fenced else self._bare
            many = min(count, len(source))
            blocks = source[-many:]
            del source[-many:]
            if self._fenced and not source:
                self._fenced.pop()
            self._pool.free_blocks(blocks)
            count -= many

    def _give_back(self) -> None:
        deadline_s = time.monotonic() + self._giving_s_per_step
        piece = max(1, _PIECE_BYTES // self.block_bytes)
        while self._fenced and self._fenced[0].after_steps <= self._ended:
            fenced = self._fenced[0]
            going = fenced.blocks[-piece:]
            if not self._let_go(runs_of(map(_block_id, going))):
                return
            del fenced.blocks[-piece:]
            self._bare += going
            if not fenced.blocks:
                self._fenced.popleft()
            if time.monotonic() >= deadline_s:
                return

    def _let_go(self, runs: list[Run]) -> bool:
        assert self._tell is not None
        self.off = next((why for why in self._tell(give_back_runs, args=(runs,)) if why), "")
        if self.off:
            log.warning("pages of keys and values go back no more", why=self.off)
            self._bring_in(self._aside())
        return not self.off


def _block_id(block: Any) -> int:
    number: int = block.block_id
    return number
