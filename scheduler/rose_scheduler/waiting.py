"""The leases that wait for an engine, in the order in which they are to be placed. Pure.

Invariants
- A lease stands where its key says (`task_order`), of equal ones in the order in which they came. None starves for it:
  a lease that has become urgent comes before all others, and of those the one that came first.
- A lease whose prefix is in an engine's cache stands in that engine's line, all others in the common one. Leases that
  wait for different versions stand apart, so that one that no engine can take holds up none behind it; nor does one
  that avoids an engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from rose_scheduler.deadlines import Deadlines
from rose_scheduler.engines import Engine
from rose_scheduler.events import LeaseAsked
from rose_scheduler.task_order import Key

Home = tuple[str, str] | None
"""The engine whose cache has a prefix, by id and incarnation."""
COMMON: Home = None
"""The line of those whose prefix is nowhere."""

_Place = tuple[bool, Key, int, str]


@dataclass(slots=True)
class Waiting:
    """A lease that waits; `home` is the engine whose cache has its prefix, or `COMMON`."""

    asked: LeaseAsked
    place: _Place
    home: Home

    @property
    def urgent(self) -> bool:
        return not self.place[0]


class WaitingLine:
    """Lease ids, each with what was asked for."""

    def __init__(self) -> None:
        self._entries: dict[str, Waiting] = {}
        self._all: list[_Place] = []
        self._homed: list[_Place] = []
        self._lines: dict[Home, dict[int, list[_Place]]] = {}
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

    def add(self, asked: LeaseAsked, key: Key, urgent_s: float, home: Home = COMMON) -> None:
        """A lease waits, and is urgent from `urgent_s` on. Raises ValueError if it waits already."""
        if asked.lease_id in self._entries:
            raise ValueError(f"{asked.lease_id} waits already")
        self._added += 1
        entry = Waiting(asked, (True, key, self._added, asked.lease_id), home)
        self._entries[asked.lease_id] = entry
        self._groups.setdefault(asked.group_id, set()).add(asked.lease_id)
        self._stand(entry)
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

    def of_group(self, group_id: str) -> list[Waiting]:
        """What waits of a group, in the order of lease ids."""
        return [self._entries[lease_id] for lease_id in sorted(self._groups.get(group_id, ()))]

    def rank(self, lease_id: str, key: Key) -> None:
        """Give a lease that waits its new key; one that is urgent has none."""
        entry = self._entries[lease_id]
        if not entry.urgent:
            self._move(entry, (True, key, *entry.place[2:]))

    def rehome(self, lease_id: str, home: Home) -> bool:
        """The prefix of a lease, if it waits, is there now. Whether that is news."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.home == home:
            return False
        self._leave(entry)
        entry.home = home
        self._stand(entry)
        return True

    def waiting_for(self, engine: Engine) -> list[str]:
        """The leases in an engine's own line."""
        return [place[3] for line in self._lines.get(engine.life, {}).values() for place in line]

    def hurry(self, now: float) -> None:
        """Put what has become urgent before all others."""
        for lease_id in self._urgency.overdue(now):
            entry = self._entries[lease_id]
            self._move(entry, (False, (), *entry.place[2:]))

    def homed(self, engine: Engine) -> Iterator[Waiting]:
        """Those that an engine can take and whose prefix it has, in order."""
        return self._line(engine.life, engine)

    def common(self, engine: Engine) -> Iterator[Waiting]:
        """Those that an engine can take and whose prefix is nowhere, in order."""
        return self._line(COMMON, engine)

    def homed_elsewhere(self, engine: Engine) -> Iterator[Waiting]:
        """Those that an engine can take, though another one has their prefix, in order."""
        for place in self._homed:
            entry = self._entries[place[3]]
            if entry.home != engine.life and engine.may_take(entry.asked):
                yield entry

    def last_behind(self, key: Key) -> str | None:
        """Who would be placed last, if one of that key comes before it."""
        if not self._all or self._all[-1][:2] <= (True, key):
            return None
        return self._all[-1][3]

    def home(self, lease_id: str) -> Home:
        """In whose line a lease waits."""
        return self._entries[lease_id].home

    def ahead(self, lease_id: str) -> int:
        """How many would be placed before it, if an engine could take any."""
        return bisect_left(self._all, self._entries[lease_id].place)

    def _line(self, home: Home, engine: Engine) -> Iterator[Waiting]:
        lines = self._lines.get(home, {})
        for place in merge(*(line for version, line in lines.items() if version <= engine.weight_version)):
            entry = self._entries[place[3]]
            if engine.may_take(entry.asked):
                yield entry

    def _move(self, entry: Waiting, place: _Place) -> None:
        self._leave(entry)
        entry.place = place
        self._stand(entry)

    def _stand(self, entry: Waiting) -> None:
        insort(self._all, entry.place)
        if entry.home != COMMON:
            insort(self._homed, entry.place)
        insort(self._lines.setdefault(entry.home, {}).setdefault(entry.asked.min_version, []), entry.place)

    def _leave(self, entry: Waiting) -> None:
        _take_out(self._all, entry.place)
        if entry.home != COMMON:
            _take_out(self._homed, entry.place)
        lines = self._lines[entry.home]
        line = lines[entry.asked.min_version]
        _take_out(line, entry.place)
        if not line:
            del lines[entry.asked.min_version]
            if not lines:
                del self._lines[entry.home]


def _take_out(line: list[_Place], place: _Place) -> None:
    del line[bisect_left(line, place)]
