"""What is remembered of trajectories and their groups: where the prefix lies, and what happened last. Pure.

Invariants
- A trajectory with an open lease is never forgotten; of the others the newest are kept, a bounded number.
- A group is known as long as one of its trajectories is. It opens with the first lease that is granted to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rose_scheduler.events import LeaseAsked
from rose_scheduler.mean import Mean
from rose_scheduler.task_order import Task

HISTORY_KEPT = 8
_TRAINING_RANK = 1 << 40


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
    """`asked` and `opened` number the groups in the order of these; `size` trajectories it has, `over` of them are.

    `turn_tokens` is what its turns bring; before the first has ended, its *probe* is under way.
    """

    group_id: str
    asked: int
    size: int
    opened: int | None = None
    members: int = 0
    over: int = 0
    turn_tokens: Mean = field(default_factory=Mean)

    @property
    def completion(self) -> float:
        return min(1.0, self.over / self.size)

    @property
    def order(self) -> int:
        return self.asked if self.opened is None else self.opened

    @property
    def probed(self) -> bool:
        return self.turn_tokens.seen > 0


@dataclass(slots=True)
class Trajectory:
    """`leases` are the ids of its open ones."""

    trajectory_id: str
    group: Group
    prefix: Prefix | None = None
    over: bool = False
    ended_s: float | None = None
    leases: set[str] = field(default_factory=set)
    history: deque[Happened] = field(default_factory=lambda: deque(maxlen=HISTORY_KEPT))

    def note(self, now: float, what: str, lease_id: str, engine_id: str = "") -> None:
        self.history.append(Happened(now, what, lease_id, engine_id))


class Trajectories:
    """Trajectories by id; of those without an open lease, `idle_max` are kept.

    `away_s` is usual between the end of a turn and the question for the next, `context_tokens` behind a turn's end.
    """

    def __init__(self, idle_max: int) -> None:
        self._idle_max = idle_max
        self._trajectories: dict[str, Trajectory] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._groups: dict[str, Group] = {}
        self._numbers = 0
        self._turn_tokens = Mean()
        self.away_s = Mean()
        self.context_tokens = Mean()

    def __len__(self) -> int:
        return len(self._trajectories)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def find(self, trajectory_id: str) -> Trajectory | None:
        return self._trajectories.get(trajectory_id)

    def task(self, asked: LeaseAsked, now: float) -> Task:
        """What counts of a turn that is asked for, or waits, when it is put in line."""
        group = self._groups.get(asked.group_id)
        return Task(
            evaluation=asked.evaluation,
            completion=0.0 if group is None else group.completion,
            probed=group is not None and group.probed,
            open=group is not None and group.opened is not None,
            active=asked.turn > 0,
            context_tokens=asked.context_tokens,
            group_order=self._numbers + 1 if group is None else group.order,
            asked_s=now,
        )

    def keep_rank(self, group_id: str, evaluation: bool) -> int:
        """Lower for what is to be kept longer: evaluations, then groups that opened earlier."""
        group = self._groups.get(group_id)
        order = self._numbers + 1 if group is None or group.opened is None else group.opened
        return order if evaluation else _TRAINING_RANK + order

    def expected_tokens(self, group_id: str) -> float:
        """What a turn of a group will bring, as far as its own turns or else those of all groups tell; 0 unknown."""
        group = self._groups.get(group_id)
        return self._turn_tokens.mean if group is None or not group.turn_tokens.seen else group.turn_tokens.mean

    def ended(self, trajectory: Trajectory, context_tokens: int, tokens: int, now: float) -> bool:
        """A turn behind such a context has brought so many. Whether it was its group's first."""
        group = trajectory.group
        first = not group.turn_tokens.seen
        group.turn_tokens.saw(tokens)
        self._turn_tokens.saw(tokens)
        self.context_tokens.saw(context_tokens + tokens)
        trajectory.ended_s = now
        return first

    def returned(self, trajectory: Trajectory, now: float) -> None:
        """It asks for a turn, from wherever it was."""
        if trajectory.ended_s is not None:
            self.away_s.saw(now - trajectory.ended_s)
            trajectory.ended_s = None

    def open(self, trajectory_id: str, group_id: str, group_size: int, lease_id: str) -> Trajectory:
        """The trajectory, known or new, with one more open lease."""
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            group = self._groups.get(group_id)
            if group is None:
                group = self._groups[group_id] = Group(group_id, self._number(), group_size)
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

    def over(self, trajectory: Trajectory) -> bool:
        """It takes no more turns. Whether that is news."""
        if trajectory.over:
            return False
        trajectory.over = True
        trajectory.group.over += 1
        return True

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
