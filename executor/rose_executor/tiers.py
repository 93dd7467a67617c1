"""How well a serving engine is guarded here, by name, and what that costs: the one place that decides it. Pure.

    tier       serving is seen by                       partition   KV memory
    unseen     nobody                                   any         any
    observe    its own page, from outside               any         any
    board      our probe in it, at each step            either of the two does not hold the guest
    full       our probe in it, at each step            binds       elastic

Invariants
- A tier is what is there now, not what was asked for. Each part that a better tier wants is named with what its lack
  costs; nothing is promised that is not there.
- KV memory is elastic where a pool is shared out, serving's part of it follows its use, and the guest itself says that
  what it does not use goes back. Until it has said so it is not.
- In every tier the guest shuts its own gate when serving cannot be seen: a lower tier costs reaction time, or what the
  guest may do, never that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rose_executor.board_states import ServingKv, ServingState
from rose_executor.kv_budget import MemoryFigures
from rose_executor.partition_terms import Partition


class Tier(StrEnum):
    """The names."""

    UNSEEN = "unseen"
    OBSERVE = "observe"
    BOARD = "board"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Memory:
    """What backs the guest's keys and values: its `name`, and whether memory goes back while the guest runs."""

    name: str
    elastic: bool


@dataclass(frozen=True, slots=True)
class TierNow:
    """`words` say what the tier gives and what it costs."""

    tier: Tier
    words: str


FIXED_SPLIT = Memory("fixed split", elastic=False)
"""A guest keeps the cache that it was started with."""
_SERVING_KEEPS = Memory("fixed split, because serving gives none back", elastic=False)
_GUEST_KEEPS = Memory("fixed split, because the guest gives none back", elastic=False)
_UNTOLD = Memory("fixed split, until the guest says that it gives memory back", elastic=False)
_SHARED_POOL = Memory("shared pool", elastic=True)

_UNSEEN = "the serving engine cannot be seen, so the guest computes nothing"
_OBSERVE = (
    "the serving engine is scraped: reaction is as late as the next look, and between two looks the guest computes no "
    "more than one token of serving may be late by; ROSE_SERVING_BOARD at its next start makes it *board*"
)
_HEARS = "each step and arrival of serving is seen as it comes"
_HEARS_STEPS = (
    "each step of serving is seen as it ends, and a request after the step that took it in: reaction is one step "
    "coarser; VLLM_PLUGINS=rose_probe at its next start mends that"
)
_NONE_CAME = "each step of serving is seen as it ends; no request has come since its start"


def memory_now(pool: MemoryFigures | None, serving_kv: ServingKv | None) -> Memory:
    """From the pool, None where none is shared out, and what serving holds, None where it gives nothing back."""
    if pool is None:
        return FIXED_SPLIT
    if serving_kv is None:
        return _SERVING_KEEPS
    if pool.gives_back is None:
        return _UNTOLD
    return _SHARED_POOL if pool.gives_back else _GUEST_KEEPS


def never_told(why: str, board: Path) -> str:
    """Why nobody is seen on a board where nothing scrapes for it, and what would change that."""
    return f"{why}; start it with ROSE_SERVING_BOARD={board}, or name its page as [serving] metrics"


def tier_now(serving: ServingState | None, partition: Partition, memory: Memory, why_unseen: str = "") -> TierNow:
    """From the board's serving half, None where that is unknown; `why_unseen` is what is known of the reason."""
    if serving is None:
        return TierNow(Tier.UNSEEN, f"{_UNSEEN}: {why_unseen}" if why_unseen else _UNSEEN)
    if serving.looked_at_s:
        return TierNow(Tier.OBSERVE, _OBSERVE)
    lacks = []
    if not partition.holds:
        lacks.append(f"partition {partition.name}: {partition.costs}")
    if not memory.elastic:
        lacks.append(f"KV memory {memory.name}: what the guest holds of it serving has back only when the guest ends")
    seen = _HEARS if serving.arrivals else _HEARS_STEPS if serving.steps else _NONE_CAME
    if lacks:
        return TierNow(Tier.BOARD, "; ".join([seen, *lacks]))
    return TierNow(Tier.FULL, f"{seen}; the guest is held by {partition.name}, its KV memory by {memory.name}")
