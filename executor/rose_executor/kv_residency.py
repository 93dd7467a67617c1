"""In which order an engine forgets cached prefixes: first those that nobody asked to keep, then those that somebody
did, the least important first.

    in use ──freed──▶ plain: as vLLM orders them, the longest unused first ──▶ handed out
        │                ▲
        └──freed──▶ kept, by name ──▶ its time is over, or nothing plain is left and no other name is less important

vLLM forgets what was used longest ago. Where more trajectories take turns than there is memory for, that is always the
one that comes back next, and hardly a prefix is ever found again.

Invariants
- Nothing is held: what is kept is free, counts as free, and is handed out as soon as there is nothing else. So no
  request waits for it, and a quota or a cut sees no difference.
- A name's blocks are given up together, and then go from the end of its prefix on: what is left of it is still found.
- A block that several names share is kept as long as one of them is.
- At most `NAMES_MAX` names are kept; one that has no blocks left is forgotten.

`ResidentQueue` stands in for the free queue of vLLM's block pool, and is asked by nobody but that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NAMES_MAX = 4096


@dataclass(slots=True)
class _Kept:
    """`blocks` by id, in the order of the prefix; the higher `rank`, the sooner it goes."""

    rank: int
    until_s: float
    blocks: dict[int, Any] = field(default_factory=dict)


class ResidentQueue:
    """In place of `plain`, a free queue of vLLM's. All calls come from the thread that schedules."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._kept: dict[str, _Kept] = {}
        self._names: dict[int, list[str]] = {}
        self._free: dict[int, Any] = {}

    @property
    def num_free_blocks(self) -> int:
        return int(self._plain.num_free_blocks) + len(self._free)

    @property
    def kept_names(self) -> int:
        return len(self._kept)

    @property
    def kept_free_blocks(self) -> int:
        """Blocks that nobody uses and that are kept."""
        return len(self._free)

    def keep(self, name: str, rank: int, until_s: float, blocks: Sequence[Any]) -> None:
        """From now on `blocks`, a prefix in its order and still in use, go late; what the name had before does not."""
        self.forget([name])
        if not blocks:
            return
        if len(self._kept) >= NAMES_MAX:
            self.forget([max(self._kept, key=self._goes_first)])
        kept = self._kept[name] = _Kept(rank, until_s, {block.block_id: block for block in blocks})
        for block_id in kept.blocks:  # each once, however often it is in the prefix
            self._names.setdefault(block_id, []).append(name)

    def forget(self, names: Iterable[str]) -> None:
        """These are not kept any more, and go before all others."""
        for name in names:
            self._plain.prepend_n(self._given_up(name))

    def forget_all(self) -> None:
        self.forget(list(self._kept))

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        self.forget([name for name, kept in self._kept.items() if kept.until_s <= now_s])

    def popleft_n(self, count: int) -> list[Any]:
        while self._plain.num_free_blocks < count and self._free:
            self._plain.append_n(self._given_up(max(self._kept, key=self._goes_first)))
        blocks: list[Any] = self._plain.popleft_n(count)
        return blocks

    def append_n(self, blocks: Iterable[Any]) -> None:
        plain = []
        for block in blocks:
            if block.block_id in self._names:
                self._free[block.block_id] = block
            else:
                plain.append(block)
        self._plain.append_n(plain)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Blocks without a prefix in them."""
        for block in blocks:
            for name in tuple(self._names.get(block.block_id, ())):
                self._drop(name, block)
        self._plain.prepend_n(blocks)

    def remove(self, block: Any) -> None:
        """It is in use again."""
        if self._free.pop(block.block_id, None) is None:
            self._plain.remove(block)

    def get_all_free_blocks(self) -> list[Any]:
        return [*self._plain.get_all_free_blocks(), *self._free.values()]

    def _goes_first(self, name: str) -> tuple[int, float]:
        kept = self._kept[name]
        return kept.rank, -kept.until_s

    def _given_up(self, name: str) -> list[Any]:
        """Its free blocks that are nobody else's either, in the order in which they are to go."""
        kept = self._kept.pop(name, None)
        blocks = () if kept is None else reversed(kept.blocks.values())
        return [block for block in blocks if self._unname(name, block)]

    def _unname(self, name: str, block: Any) -> bool:
        """Whether a block is free and in no name's any more."""
        names = self._names[block.block_id]
        names.remove(name)
        if names:
            return False
        del self._names[block.block_id]
        return self._free.pop(block.block_id, None) is not None

    def _drop(self, name: str, block: Any) -> None:
        kept = self._kept[name]
        del kept.blocks[block.block_id]
        self._unname(name, block)
        if not kept.blocks:
            del self._kept[name]
