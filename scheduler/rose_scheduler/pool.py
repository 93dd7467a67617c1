"""The KV memory of one engine, in tokens: who runs there, and whose prefix its cache still holds. Pure.

An engine keeps cached prefixes for as long as nothing else needs their memory, and gives up those of the highest rank
first, each from its end on (`rose_executor.kv_residency`). So what was sent there says what is still there.

Invariants
- What runs and what is resident fit into the capacity together; where what runs does not even fit alone, nothing is
  resident.
- A trajectory's prefix is resident or in use, never both.
- A pool of unknown capacity holds everything.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrivenOut:
    """Tokens of prefixes that are to be kept longer than the one that drives them out, and of all others."""

    kept_longer: int
    kept_less: int


class Pool:
    """`capacity_tokens` is 0 as long as it is unknown."""

    def __init__(self) -> None:
        self.capacity_tokens = 0
        self.running_tokens = 0
        self.resident_tokens = 0
        self._running: dict[str, int] = {}
        self._residents: dict[str, tuple[int, int]] = {}
        self._order: list[tuple[int, str]] = []

    @property
    def running(self) -> int:
        """How many turns run."""
        return len(self._running)

    @property
    def residents(self) -> int:
        return len(self._residents)

    def resident(self, trajectory_id: str) -> int:
        """Tokens of its prefix that are still there and not in use."""
        return self._residents.get(trajectory_id, (0, 0))[0]

    def fits(self, tokens: int) -> bool:
        """Whether a turn that will have so many tokens has room beside those that run. Alone, any has."""
        return not self._running or not self.capacity_tokens or self.running_tokens + tokens <= self.capacity_tokens

    def driven_out(self, tokens: int, rank: int) -> DrivenOut:
        """What would go if `tokens` more were in use, for a prefix of that `rank`."""
        missing = self._missing(tokens)
        kept_longer = kept_less = 0
        for other, trajectory_id in reversed(self._order):
            if missing <= 0:
                break
            goes = min(missing, self._residents[trajectory_id][0])
            missing -= goes
            if other < rank:
                kept_longer += goes
            else:
                kept_less += goes
        return DrivenOut(kept_longer, kept_less)

    def set_capacity(self, tokens: int) -> tuple[str, ...]:
        """Returns whose prefixes went, whole."""
        self.capacity_tokens = tokens
        return tuple(self._make_room())

    def start(self, lease_id: str, trajectory_id: str, tokens: int) -> tuple[str, ...]:
        """A turn runs now, and will have so many tokens. Returns whose prefixes went for it, whole."""
        self.forget(trajectory_id)
        self._running[lease_id] = tokens
        self.running_tokens += tokens
        return tuple(self._make_room())

    def stop(self, lease_id: str) -> None:
        """A turn runs no more, and leaves nothing."""
        self.running_tokens -= self._running.pop(lease_id, 0)

    def leave(self, lease_id: str, trajectory_id: str, tokens: int, rank: int) -> tuple[str, ...]:
        """A turn has ended and leaves a prefix of so many tokens. Returns whose prefixes went, whole."""
        self.stop(lease_id)
        self.forget(trajectory_id)
        if tokens > 0:
            self._residents[trajectory_id] = (tokens, rank)
            self.resident_tokens += tokens
            insort(self._order, (rank, trajectory_id))
        return tuple(self._make_room())

    def forget(self, trajectory_id: str) -> None:
        """Its prefix is in use, or nobody will ask for it again."""
        found = self._residents.pop(trajectory_id, None)
        if found is not None:
            tokens, rank = found
            self.resident_tokens -= tokens
            del self._order[bisect_left(self._order, (rank, trajectory_id))]

    def forget_all(self) -> tuple[str, ...]:
        """The cache was emptied. Returns whose prefixes went."""
        gone = tuple(self._residents)
        self._residents.clear()
        self._order.clear()
        self.resident_tokens = 0
        return gone

    def _missing(self, tokens: int) -> int:
        if not self.capacity_tokens:
            return 0
        return self.running_tokens + self.resident_tokens + tokens - self.capacity_tokens

    def _make_room(self) -> Iterator[str]:
        while (missing := self._missing(0)) > 0 and self._order:
            rank, trajectory_id = self._order[-1]
            tokens = self._residents[trajectory_id][0]
            if missing < tokens:
                self._residents[trajectory_id] = (tokens - missing, rank)
                self.resident_tokens -= missing
                return
            self.forget(trajectory_id)
            yield trajectory_id
