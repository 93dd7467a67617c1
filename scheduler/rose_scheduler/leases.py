"""Leases that are open, and those that are over. Pure.

Invariants
- A lease is open or over, never both, and over once. What is over is remembered, a bounded number of them.
- Every open lease has one deadline: to be granted by, then to be ended by.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from rose_scheduler.deadlines import Deadlines
from rose_scheduler.engines import Engine
from rose_scheduler.events import EndVerdict, Grant, Lapse, LeaseAsked, LeaseOutcome
from rose_scheduler.trajectories import Trajectory


@dataclass(slots=True)
class Lease:
    """Waits while `grant` is None; `engine` is the one that was granted, `tokens` what it brought."""

    asked: LeaseAsked
    asked_s: float
    trajectory: Trajectory
    grant: Grant | None = None
    granted_s: float = 0.0
    engine: Engine | None = None
    tokens: int = 0

    def is_for(self, event: LeaseAsked) -> bool:
        """Whether `event` asks for this very lease; when, for how long and with what token plays no part."""
        return _content(self.asked) == _content(event)


def _content(event: LeaseAsked) -> tuple[str, str, int, int, int]:
    return (event.trajectory_id, event.group_id, event.turn, event.context_tokens, event.min_version)


class Leases:
    """Leases by id; of those that are over, `ended_max` are remembered."""

    def __init__(self, ended_max: int) -> None:
        self._ended_max = ended_max
        self._open: dict[str, Lease] = {}
        self._over: OrderedDict[str, tuple[LeaseOutcome | Lapse, str]] = OrderedDict()
        self._deadlines: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def remembered(self) -> int:
        """Entries of any kind in memory."""
        return len(self._open) + len(self._over) + self._deadlines.kept

    def find(self, lease_id: str) -> Lease | None:
        """An open lease."""
        return self._open.get(lease_id)

    def how_over(self, lease_id: str) -> LeaseOutcome | Lapse | None:
        """How a lease ended, None if it is open, unknown or forgotten."""
        over = self._over.get(lease_id)
        return None if over is None else over[0]

    def whose(self, lease_id: str) -> str | None:
        """The trajectory of a lease, open or over; None if it is unknown or forgotten."""
        lease, over = self._open.get(lease_id), self._over.get(lease_id)
        if lease is not None:
            return lease.asked.trajectory_id
        return None if over is None else over[1]

    def verdict(self, lease_id: str) -> EndVerdict:
        """What to say to the end of a lease that is not held."""
        match self.how_over(lease_id):
            case LeaseOutcome():
                return EndVerdict.DUPLICATE
            case Lapse():
                return EndVerdict.LATE
        return EndVerdict.UNKNOWN

    def wait(self, lease: Lease) -> None:
        """The lease is open and waits until its deadline."""
        self._open[lease.asked.lease_id] = lease
        self._deadlines.set(lease.asked.lease_id, lease.asked.deadline_s)

    def grant(self, lease: Lease, engine: Engine, grant: Grant, now: float) -> None:
        """The lease is open and held until `grant.until_s`."""
        lease.grant, lease.engine, lease.granted_s = grant, engine, now
        self._open[grant.lease_id] = lease
        self._deadlines.set(grant.lease_id, grant.until_s)

    def withdraw(self, lease: Lease) -> None:
        """Forget a lease as if it had never been asked for."""
        del self._open[lease.asked.lease_id]
        self._deadlines.drop(lease.asked.lease_id)

    def end(self, lease: Lease, how: LeaseOutcome | Lapse) -> None:
        self.withdraw(lease)
        self.remember(lease.asked, how)

    def remember(self, asked: LeaseAsked, how: LeaseOutcome | Lapse) -> None:
        """A lease is over that is not open."""
        self._over[asked.lease_id] = (how, asked.trajectory_id)
        if len(self._over) > self._ended_max:
            self._over.popitem(last=False)

    def overdue(self, now: float) -> Iterator[Lease]:
        """Open leases whose deadline has come; all must be ended."""
        for lease_id in self._deadlines.overdue(now):
            yield self._open[lease_id]

    def next_s(self) -> float | None:
        return self._deadlines.next_s()
