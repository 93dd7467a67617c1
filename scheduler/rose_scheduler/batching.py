"""Which turn may start on which engine, where there is not enough KV memory for all trajectories. Pure.

A turn whose prefix is resident costs next to nothing to go on with. Any other may drive prefixes out that will have to
be computed again, which every turn that runs there then waits for. So of those that wait for an engine the residents go
first. Another starts where its price is less than its gain,

    tokens driven out x seconds to compute one x turns that run  <=  gain x seconds from one turn of it to the next

or when it has waited for so long that it is urgent, or where it is of an evaluation. A turn is taken to need at least
as much memory as turns usually do, since a trajectory that begins small grows. What it drives out that would be given
up before its own prefix counts half: that is driven out soon by somebody.

Invariants
- An engine never idles while somebody waits that it may take, unless his own engine is expected to take him sooner than
  his prefix could be computed anew: with nothing running every price is 0.
- Turns that run fit into the engine's KV memory together, with what they are expected to bring; alone, any runs. No
  room is held back for one that does not fit yet, urgent or not: smaller ones go on.
- No decision takes longer the more wait: of each line `SCAN` that an engine may take are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from rose_scheduler.engines import Engine, Engines
from rose_scheduler.events import Health, LeaseAsked
from rose_scheduler.residency import Residency
from rose_scheduler.task_order import TaskOrder, lexicographic
from rose_scheduler.trajectories import Trajectories, Trajectory
from rose_scheduler.waiting import Waiting, WaitingLine

SCAN = 16
_GOES_ANYWAY = 0.5
"""What a token counts that is driven out by somebody who is to be kept longer."""


@dataclass(frozen=True, slots=True)
class Batching:
    """Raises ValueError for what makes no sense.

    `order` of those that wait; `gain` is how much of a trajectory's cycle a start may cost all others together; a lease
    is urgent when it has waited for `urgent_after`, a share, of the time that it may.
    """

    order: TaskOrder = lexicographic
    gain: float = 0.25
    urgent_after: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.gain < float("inf") or not 0 < self.urgent_after <= 1:
            raise ValueError(f"a gain is 0 or more, and a share in (0, 1]: {self}")


class Batch:
    """Chooses; changes nothing."""

    def __init__(
        self,
        batching: Batching,
        engines: Engines,
        line: WaitingLine,
        trajectories: Trajectories,
        residency: Residency,
    ) -> None:
        self.batching = batching
        self._residency = residency
        self._engines = engines
        self._line = line
        self._trajectories = trajectories

    def engine_for(self, asked: LeaseAsked, trajectory: Trajectory | None) -> Engine | None:
        """Which engine takes a turn now that was just asked for; None if it is to wait."""
        home = self._residency.home_of(asked, trajectory)
        if home is not None and home.has_room and self._may_start(asked, home, urgent=False):
            return home
        others: Iterable[Engine] = islice(self._engines.with_room(asked), SCAN)
        if home is not None:
            others = (engine for engine in others if engine is not home and self._worth_moving(asked, home, engine))
        return next((engine for engine in others if self._may_start(asked, engine, urgent=False)), None)

    def turn_for(self, engine: Engine) -> str | None:
        """Which of those that wait an engine with room takes next; None if none may start there now."""
        for entry in self._in_turn(engine):
            if self._may_start(entry.asked, engine, urgent=entry.urgent):
                return entry.asked.lease_id
        for entry in islice(self._line.homed_elsewhere(engine), SCAN):
            home = None if entry.home is None else self._engines.live(*entry.home)
            leaves = home is None or entry.urgent or self._worth_moving(entry.asked, home, engine)
            if leaves and self._may_start(entry.asked, engine, urgent=entry.urgent):
                return entry.asked.lease_id
        return None

    def _in_turn(self, engine: Engine) -> Iterator[Waiting]:
        """Residents first, unless somebody else is urgent or of an evaluation."""
        homed, common = islice(self._line.homed(engine), SCAN), islice(self._line.common(engine), SCAN)
        first, other = next(homed, None), next(common, None)
        ordered: list[Iterable[Waiting]] = [_some(first), homed, _some(other), common]
        if other is not None and (first is None or _presses(other) > _presses(first)):
            ordered = [_some(other), _some(first), homed, common]
        return chain(*ordered)

    def _may_start(self, asked: LeaseAsked, engine: Engine, *, urgent: bool) -> bool:
        pool = engine.pool
        will_have = asked.context_tokens + self._trajectories.expected_tokens(asked.group_id)
        if not pool.fits(round(will_have)):
            return False
        if urgent or asked.evaluation or pool.resident(asked.trajectory_id):
            return True
        return self._price_s(asked, engine, round(will_have)) <= self.batching.gain * self._cycle_s(engine)

    def _price_s(self, asked: LeaseAsked, engine: Engine, tokens: int) -> float:
        """Seconds that turns which run there will lose, all together, for what a start drives out."""
        rank = self._trajectories.keep_rank(asked.group_id, asked.evaluation)
        usual = self._trajectories.context_tokens.mean
        goes = engine.pool.driven_out(max(tokens, round(usual)), rank)
        return (goes.kept_longer + _GOES_ANYWAY * goes.kept_less) * engine.token_s * engine.pool.running

    def _cycle_s(self, engine: Engine) -> float:
        """From the start of a trajectory's turn there to that of its next one."""
        return engine.turn_s.mean + self._trajectories.away_s.mean

    def _worth_moving(self, asked: LeaseAsked, home: Engine, engine: Engine) -> bool:
        """Whether computing the prefix anew elsewhere takes less time than waiting for the engine that has it."""
        ahead = sum(1 for _ in islice(self._line.homed(home), SCAN)) + 1
        if home.health is not Health.HEALTHY or not home.slots:
            return True
        wait_s = home.turn_s.mean * ahead / home.slots
        return asked.context_tokens * engine.token_s <= wait_s


def _some(entry: Waiting | None) -> tuple[Waiting, ...]:
    return () if entry is None else (entry,)


def _presses(entry: Waiting) -> tuple[bool, bool]:
    return entry.urgent, entry.asked.evaluation
