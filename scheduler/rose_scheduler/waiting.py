"""The leases that wait for an engine, in the order in which they are to be placed. Pure.

Invariants
- Open groups come before new ones, among open groups the one that opened first, among new ones the one that asked
  first, within a group the lease that asked first.
- None starves for it: a lease that has become urgent comes before all groups, and of those the one that asked first.
- Leases that wait for different versions stand in lines of their own, so that one that no engine can take holds up
  none behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from rose_scheduler.deadlines import Deadlines

GroupRank = tuple[int, int]
"""Lower is sooner; the first number is never below 0."""

_URGENT: GroupRank = (-1, 0)

_Place = tuple[GroupRank, int, str]


@dataclass(slots=True)
class _Entry:
    group_id: str
    min_version: int
    place: _Place


class WaitingLine:
    """Lease ids, each with its group and the version that it needs."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._lines: dict[int, list[_Place]] = {}
        self._groups: dict[str, set[str]] = {}
        self._urgency: Deadlines[str] = Deadlines()
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def remembered(self) -> int:
        """Entries of any kind in memory."""
        return len(self._entries) + self._urgency.kept

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._entries

    def add(self, lease_id: str, group_id: str, rank: GroupRank, min_version: int, urgent_s: float) -> None:
        """A lease waits, and is urgent from `urgent_s` on. Raises ValueError if it waits already."""
        if lease_id in self._entries:
            raise ValueError(f"{lease_id} waits already")
        self._added += 1
        entry = _Entry(group_id, min_version, (rank, self._added, lease_id))
        self._entries[lease_id] = entry
        self._groups.setdefault(group_id, set()).add(lease_id)
        insort(self._lines.setdefault(min_version, []), entry.place)
        self._urgency.set(lease_id, urgent_s)

    def drop(self, lease_id: str) -> None:
        """Take a lease out, if it waits."""
        entry = self._entries.pop(lease_id, None)
        if entry is None:
            return
        self._leave(entry)
        self._urgency.drop(lease_id)
        members = self._groups[entry.group_id]
        members.discard(lease_id)
        if not members:
            del self._groups[entry.group_id]

    def rank(self, group_id: str, rank: GroupRank) -> None:
        """Give what waits of a group its new rank."""
        for lease_id in sorted(self._groups.get(group_id, ())):
            entry = self._entries[lease_id]
            if entry.place[0] != _URGENT:
                self._move(entry, rank)

    def hurry(self, now: float) -> None:
        """Put what has become urgent before all groups."""
        for lease_id in self._urgency.overdue(now):
            self._move(self._entries[lease_id], _URGENT)

    def first(self, version: int) -> str | None:
        """Whom an engine that runs `version` is to take next."""
        heads = (line[0] for min_version, line in self._lines.items() if min_version <= version)
        place = min(heads, default=None)
        return None if place is None else place[2]

    def last_behind(self, rank: GroupRank) -> str | None:
        """Who would be placed last, if a group of that `rank` comes before it."""
        place = max((line[-1] for line in self._lines.values()), default=None)
        return None if place is None or place[0] <= rank else place[2]

    def ahead(self, lease_id: str) -> int:
        """How many would be placed before it, if an engine could take any."""
        place = self._entries[lease_id].place
        return sum(bisect_left(line, place) for line in self._lines.values())

    def _move(self, entry: _Entry, rank: GroupRank) -> None:
        self._leave(entry)
        entry.place = (rank, *entry.place[1:])
        insort(self._lines.setdefault(entry.min_version, []), entry.place)

    def _leave(self, entry: _Entry) -> None:
        line = self._lines[entry.min_version]
        del line[bisect_left(line, entry.place)]
        if not line:
            del self._lines[entry.min_version]
