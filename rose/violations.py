"""Broken rules of a pure core: recorded, never raised, so that the state of a broken run can still be read."""

from __future__ import annotations

KEPT = 100


class Violations:
    """The first 100 broken rules in words, since the first ones hold the cause; the rest are only counted."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._more = 0

    def add(self, why: str) -> None:
        if len(self._first) < KEPT:
            self._first.append(why)
        else:
            self._more += 1

    def lines(self) -> tuple[str, ...]:
        """Oldest first; past the first 100, one last line says how many more."""
        return (*self._first, f"and {self._more} more") if self._more else tuple(self._first)
