"""What is remembered of trajectories and their groups: where the prefix lies, and what happened last. Pure.

Invariants
- A trajectory with an open lease is never forgotten; of the others the newest are kept, a bounded number.
- A group is known as long as one of its trajectories is. It opens with the first lease that is granted to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rose_scheduler.waiting import GroupRank

HISTORY_KEPT = 8


@dataclass(frozen=True, slots=True)
class Happened:
    """One thing that happened to a trajectory."""

    at_s: float
    what: str
    lease_id: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """Which engine's cache holds what a trajectory has said so far; of no use under another version."""

    engine_id: str
    incarnation: str
    weight_version: int


@dataclass(slots=True)
class Group:
    """`asked` and `opened` number the groups in the order of these."""

    group_id: str
    asked: int
    opened: int | None = None
    members: int = 0

    @property
    def rank(self) -> GroupRank:
        return (1, self.asked) if self.opened is None else (0, self.opened)


@dataclass(slots=True)
class Trajectory:
    """`leases` are the ids of its open ones."""

    trajectory_id: str
    group: Group
    prefix: Prefix | None = None
    leases: set[str] = field(default_factory=set)
    history: deque[Happened] = field(default_factory=lambda: deque(maxlen=HISTORY_KEPT))

    def note(self, now: float, what: str, lease_id: str, engine_id: str = "") -> None:
        self.history.append(Happened(now, what, lease_id, engine_id))


class Trajectories:
    """Trajectories by id; of those without an open lease, `idle_max` are kept."""

    def __init__(self, idle_max: int) -> None:
        self._idle_max = idle_max
        self._trajectories: dict[str, Trajectory] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._groups: dict[str, Group] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._trajectories)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def find(self, trajectory_id: str) -> Trajectory | None:
        return self._trajectories.get(trajectory_id)

    def rank(self, group_id: str) -> GroupRank:
        """A group's rank; a new one comes last."""
        group = self._groups.get(group_id)
        return (1, self._numbers + 1) if group is None else group.rank

    def open(self, trajectory_id: str, group_id: str, lease_id: str) -> Trajectory:
        """The trajectory, known or new, with one more open lease."""
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            group = self._groups.get(group_id)
            if group is None:
                group = self._groups[group_id] = Group(group_id, self._number())
            group.members += 1
            trajectory = self._trajectories[trajectory_id] = Trajectory(trajectory_id, group)
        self._idle.pop(trajectory_id, None)
        trajectory.leases.add(lease_id)
        return trajectory

    def close(self, trajectory: Trajectory, lease_id: str) -> None:
        """One of its leases is over."""
        trajectory.leases.discard(lease_id)
        if trajectory.leases:
            return
        self._idle[trajectory.trajectory_id] = None
        if len(self._idle) > self._idle_max:
            self._forget(self._idle.popitem(last=False)[0])

    def granted(self, group: Group) -> bool:
        """A lease of the group was granted. Whether that opened it."""
        if group.opened is not None:
            return False
        group.opened = self._number()
        return True

    def _forget(self, trajectory_id: str) -> None:
        group = self._trajectories.pop(trajectory_id).group
        group.members -= 1
        if not group.members:
            del self._groups[group.group_id]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
