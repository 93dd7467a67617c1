"""Many deadlines, of which the earliest are wanted. Pure.

Invariants
- A name has at most one deadline; setting it again replaces it.
- What is kept is at most twice what is set, and some: deadlines that were dropped do not stay for their time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")

_SPARE = 64


class Deadlines(Generic[K]):
    """Names by the time when they are due, in seconds; equal times in the order of setting."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._numbers: dict[K, int] = {}
        self._set = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def kept(self) -> int:
        """Entries in memory, dropped ones included."""
        return len(self._heap)

    def set(self, name: K, due_s: float) -> None:
        self._set += 1
        self._numbers[name] = self._set
        heapq.heappush(self._heap, (due_s, self._set, name))
        self._tidy()

    def drop(self, name: K) -> None:
        """Forget a deadline, if there is one."""
        if self._numbers.pop(name, None) is not None:
            self._tidy()

    def next_s(self) -> float | None:
        """When the earliest is due, None if there is none."""
        while self._heap and not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def overdue(self, now: float) -> Iterator[K]:
        """Take out what is due, the earliest first; what is set or dropped meanwhile counts."""
        while (due_s := self.next_s()) is not None and due_s <= now:
            _, _, name = heapq.heappop(self._heap)
            del self._numbers[name]
            yield name

    def _holds(self, entry: tuple[float, int, K]) -> bool:
        return self._numbers.get(entry[2]) == entry[1]

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._numbers) + _SPARE:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)
