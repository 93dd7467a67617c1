"""Which pieces of one object are still to be asked for, under way, or in place. A pure core.

Invariants
- Every byte from `resume_from` to the end belongs to exactly one piece, and each piece is in exactly one of three
  states: to ask, under way, in place.
- `complete_bytes` only grows; everything below it is in place.
"""

from __future__ import annotations

import heapq


class PieceList:
    """Pieces of `piece_bytes`, the last one shorter. As long as the size is unknown, only the first is asked for."""

    def __init__(self, resume_from: int, piece_bytes: int, size_bytes: int | None) -> None:
        self._piece_bytes = piece_bytes
        self._next = resume_from
        self._again: list[int] = []
        self._under_way: set[int] = set()
        self._ahead: dict[int, int] = {}
        self.size_bytes = size_bytes
        self.complete_bytes = resume_from

    @property
    def done(self) -> bool:
        return self.size_bytes is not None and self.complete_bytes >= self.size_bytes and not self._under_way

    def has_next(self) -> bool:
        """Whether `take` has something to give."""
        if self._again:
            return True
        if self.size_bytes is None:
            return not self._under_way
        return self._next < self.size_bytes

    def take(self) -> tuple[int, int]:
        """Offset and length of the next piece, lost ones and lower offsets first. Only if `has_next`."""
        if self._again:
            offset = heapq.heappop(self._again)
        else:
            offset = self._next
            self._next += self._piece_bytes
        self._under_way.add(offset)
        return offset, self._piece_bytes

    def length_at(self, offset: int) -> int:
        """How long the piece at `offset` is, as far as the size is known."""
        if self.size_bytes is None:
            return self._piece_bytes
        return max(0, min(self._piece_bytes, self.size_bytes - offset))

    def lost(self, offset: int) -> None:
        """A piece under way will not come."""
        self._under_way.remove(offset)
        heapq.heappush(self._again, offset)

    def landed(self, offset: int, length: int) -> bool:
        """A piece under way is in place. Returns whether `complete_bytes` grew."""
        self._under_way.remove(offset)
        self._ahead[offset] = length
        before = self.complete_bytes
        while (step := self._ahead.pop(self.complete_bytes, 0)) > 0:
            self.complete_bytes += step
        return self.complete_bytes > before
