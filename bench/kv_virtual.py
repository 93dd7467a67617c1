"""The tasks of `kv` on virtual time, in vLLM's default order or as the scheduler's core says.

Invariant
- What decides is the product's own `Placement`; engine and environments alone are simulated.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.kv_tasks import Task
from bench.kv_virtual_engine import VirtualEngine
from rose.driver.core import After
from rose_executor.keep_prefix import Keep
from rose_scheduler.batching import Batching
from rose_scheduler.events import (
    EngineBeat,
    EngineKind,
    EngineOffered,
    Expire,
    Grant,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    PlacementEvent,
    TrajectoryOver,
)
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement

ASK_S = 300.0
"""How long a turn may wait for its engine."""
_KEEP_S = 3000.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`tok_s` are answers' tokens; `hit_rate` is of prompt tokens; `group_s` the median of groups, from their first
    question to their last answer."""

    seconds: float
    tok_s: float
    hit_rate: float
    preemptions: int
    group_s: float


class Clock:
    """Virtual time, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now + delay_s, next(self._numbers), what))

    def until(self, at_s: float) -> None:
        while self._calls and self._calls[0][0] <= at_s:
            self.now, _, what = heapq.heappop(self._calls)
            what()
        self.now = max(self.now, at_s)

    @property
    def next_s(self) -> float | None:
        return self._calls[0][0] if self._calls else None


@dataclass(slots=True)
class _Open:
    task: Task
    number: int = 0
    context: list[int] = field(default_factory=list)


class Runner(ABC):
    """Plays tasks against an engine; a subclass says when a turn is sent."""

    def __init__(self, engine: VirtualEngine, tasks: Sequence[Task], open_max: int) -> None:
        self.clock = Clock()
        self.engine = engine
        self._open_max = open_max
        self._tasks = list(tasks)
        self._groups_left = {task.group_id: task.group_size for task in tasks}
        self._groups_began_s: dict[str, float] = {}
        self._groups_took_s: list[float] = []

    def run(self) -> Outcome:
        for _ in range(min(self._open_max, len(self._tasks))):
            self._open(self._tasks.pop(0))
        while True:
            if self.engine.busy:
                seconds, ended = self.engine.step()
                self.clock.until(self.clock.now + seconds)
                for call in ended:
                    call()
            elif self.clock.next_s is not None:
                self.clock.until(self.clock.next_s)
            else:
                break
        assert not any(self._groups_left.values()), "tasks are left over"
        seconds, engine = self.clock.now, self.engine
        hit_rate = engine.found_tokens / max(1, engine.asked_tokens)
        group_s = median(self._groups_took_s)
        return Outcome(seconds, engine.generated / seconds, hit_rate, engine.preemptions, group_s)

    @abstractmethod
    def wants(self, one: _Open) -> None:
        """Its next turn may be sent from now on."""

    @abstractmethod
    def over(self, one: _Open) -> None:
        """It takes no more turns."""

    def _open(self, task: Task) -> None:
        one = _Open(task)
        one.context += task.turns[0].said
        self._groups_began_s.setdefault(task.group_id, self.clock.now)
        self.wants(one)

    def send(self, one: _Open, keep: Keep | None, ended: Callable[[int], None]) -> None:
        turn = one.task.turns[one.number]

        def done(answer: list[int]) -> None:
            one.context += answer
            one.number += 1
            ended(len(answer))
            if one.number < len(one.task.turns):
                following = one.task.turns[one.number]
                self.clock.call(following.tool_s, lambda: self._said(one))
                return
            self._groups_left[one.task.group_id] -= 1
            if not self._groups_left[one.task.group_id]:
                self._groups_took_s.append(self.clock.now - self._groups_began_s[one.task.group_id])
            self.over(one)
            if self._tasks:
                self._open(self._tasks.pop(0))

        self.engine.submit(f"{one.task.trajectory_id}.{one.number}", one.context, turn.answer_tokens, done, keep)

    def _said(self, one: _Open) -> None:
        one.context += one.task.turns[one.number].said
        self.wants(one)


class FirstCome(Runner):
    """vLLM's default order: every turn is sent as soon as it can be."""

    def wants(self, one: _Open) -> None:
        self.send(one, None, lambda tokens: None)

    def over(self, one: _Open) -> None:
        pass


class Batched(Runner):
    """As the scheduler says."""

    def __init__(
        self,
        engine: VirtualEngine,
        tasks: Sequence[Task],
        open_max: int,
        kv_tokens: int,
        batching: Batching,
        slots: int = 64,
    ) -> None:
        super().__init__(engine, tasks, open_max)
        self._core = Placement(Limits(beat_deadline_s=1e6, dead_after_s=1e7, waiting=1 << 20), batching)
        self._asking: dict[str, _Open] = {}
        self._forget: list[str] = []
        self._feed(EngineOffered("e", "1", EngineKind.DEDICATED, "at-e", slots, 0))
        self._feed(EngineBeat("e", "1", 0, slots, 0.0, kv_tokens, engine.cost.token_s))

    def wants(self, one: _Open) -> None:
        lease_id = f"{one.task.trajectory_id}.{one.number}"
        self._asking[lease_id] = one
        self._feed(
            LeaseAsked(
                lease_id, one.task.trajectory_id, one.task.group_id, one.number, len(one.context), 0,
                self.clock.now + ASK_S, ASK_S, "", group_size=one.task.group_size,
            )
        )  # fmt: skip

    def over(self, one: _Open) -> None:
        self._forget.append(one.task.trajectory_id)
        self._feed(TrajectoryOver(one.task.trajectory_id))

    def _feed(self, event: PlacementEvent) -> None:
        for action in self._core.step(event, self.clock.now):
            match action:
                case Grant():
                    one = self._asking.pop(action.lease_id)
                    keep = Keep(one.task.trajectory_id, action.keep_rank, _KEEP_S, tuple(self._forget))
                    self._forget = []
                    self.send(one, keep, self._ending(action.lease_id))
                case Expire():
                    raise AssertionError(action)
                case After():
                    pass

    def _ending(self, lease_id: str) -> Callable[[int], None]:
        return lambda tokens: self._feed(LeaseEnded(lease_id, LeaseOutcome.DONE, tokens))
