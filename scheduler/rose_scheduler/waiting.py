"""The leases that wait for an engine, in the order in which they are to be placed. Pure.

Invariants
- Open groups come before new ones, among open groups the one that opened first, among new ones the one that asked
  first, within a group the lease that asked first.
- None starves for it: a lease that has become urgent comes before all groups, and of those the one that asked first.
- Leases that wait for different versions stand in lines of their own, so that one that no engine can take holds up
  none behind it; nor does one that avoids an engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from rose_scheduler.deadlines import Deadlines
from rose_scheduler.engines import Engine
from rose_scheduler.events import LeaseAsked

GroupRank = tuple[int, int]
"""Lower is sooner; the first number is never below 0."""

_URGENT: GroupRank = (-1, 0)

_Place = tuple[GroupRank, int, str]


@dataclass(slots=True)
class _Entry:
    asked: LeaseAsked
    place: _Place


class WaitingLine:
    """Lease ids, each with what was asked for."""

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

    def add(self, asked: LeaseAsked, rank: GroupRank, urgent_s: float) -> None:
        """A lease waits, and is urgent from `urgent_s` on. Raises ValueError if it waits already."""
        if asked.lease_id in self._entries:
            raise ValueError(f"{asked.lease_id} waits already")
        self._added += 1
        entry = _Entry(asked, (rank, self._added, asked.lease_id))
        self._entries[asked.lease_id] = entry
        self._groups.setdefault(asked.group_id, set()).add(asked.lease_id)
        insort(self._lines.setdefault(asked.min_version, []), entry.place)
        self._urgency.set(asked.lease_id, urgent_s)

    def drop(self, lease_id: str) -> None:
        """Take a lease out, if it waits."""
        entry = self._entries.pop(lease_id, None)
        if entry is None:
            return
        self._leave(entry)
        self._urgency.drop(lease_id)
        members = self._groups[entry.asked.group_id]
        members.discard(lease_id)
        if not members:
            del self._groups[entry.asked.group_id]

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

    def first(self, engine: Engine) -> str | None:
        """Whom an engine with room is to take next."""
        heads = (self._head(line, engine) for version, line in self._lines.items() if version <= engine.weight_version)
        place = min((head for head in heads if head is not None), default=None)
        return None if place is None else place[2]

    def _head(self, line: list[_Place], engine: Engine) -> _Place | None:
        return next((place for place in line if engine.incarnation not in self._entries[place[2]].asked.avoid), None)

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
        insort(self._lines.setdefault(entry.asked.min_version, []), entry.place)

    def _leave(self, entry: _Entry) -> None:
        line = self._lines[entry.asked.min_version]
        del line[bisect_left(line, entry.place)]
        if not line:
            del self._lines[entry.asked.min_version]
