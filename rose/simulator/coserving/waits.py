"""The world's own books of who waits: nothing may be waited for beyond its deadline."""

from __future__ import annotations

import heapq

from rose.simulator.world import must

_ROUNDING_S = 1e-6


class WaitBooks:
    """Open waits, each with what is waited for and until when at the latest."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._until: list[tuple[float, int]] = []
        self._begun = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, what: str, until_s: float) -> int:
        """Somebody waits; the number is for `end`."""
        self._begun += 1
        self._open[self._begun] = what
        heapq.heappush(self._until, (until_s, self._begun))
        return self._begun

    def end(self, number: int) -> None:
        """It is over; again changes nothing."""
        self._open.pop(number, None)

    def check(self, now: float) -> None:
        """Raise ContractError if somebody still waits whose deadline is past."""
        while self._until and (self._until[0][0] < now - _ROUNDING_S or self._until[0][1] not in self._open):
            until_s, number = heapq.heappop(self._until)
            must(number not in self._open, "a wait has outlived its deadline", (self._open.get(number), until_s))

    def open(self) -> list[str]:
        return list(self._open.values())
