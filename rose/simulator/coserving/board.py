"""The board between a serving engine and its guest, in virtual time.

Invariants
- A half is unknown once it is older than the product's own limit for it. A serving engine beats as long as it lives,
  so its half grows old from its death on; the quota and the guest's half grow old from their last write on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_executor.board import SERVING, Half, S
from rose_executor.board_states import Reading


@dataclass(slots=True)
class _Written:
    state: Any
    at_s: float
    number: int


class SimulatedBoard:
    """One page. `serving_died_s` is when the writer of the serving half died, None while it lives."""

    def __init__(self) -> None:
        self.serving_died_s: float | None = None
        self._halves: dict[str, _Written] = {}

    def write(self, half: Half[S], state: S, now: float) -> None:
        before = self._halves.get(half.name)
        self._halves[half.name] = _Written(state, now, 1 if before is None else before.number + 1)

    def read(self, half: Half[S], now: float) -> Reading[S]:
        written = self._halves.get(half.name)
        if written is None:
            return Reading(None, why="never written")
        if self._age_s(half, written, now) >= half.stale_after_s:
            return Reading(None, written.number, "stale")
        return Reading(written.state, written.number)

    def written_s(self, half: Half[S]) -> float:
        """When a half was written last; long ago if it never was."""
        written = self._halves.get(half.name)
        return -1e9 if written is None else written.at_s

    def _age_s(self, half: Half[S], written: _Written, now: float) -> float:
        if half.name != SERVING.name:
            return now - written.at_s
        return 0.0 if self.serving_died_s is None else now - self.serving_died_s
