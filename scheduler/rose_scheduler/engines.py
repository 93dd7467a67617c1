"""The engines that are offered: their health, and which has room. Pure.

Invariants
- `best` gives only an engine that is healthy, has room, runs the version that was asked for, and is not to be avoided.
- An engine id has one live incarnation and an address one live engine: the newer offer ends the older one, and
  what was ended so or by its own word never comes back. Only the id of an engine of the run's own is not for one that
  is lent, whatever its executor calls itself.
- The number of engines is bounded, and so is what is remembered of those that are over.

State table of an incarnation

    state      EngineBeat   silent for beat_deadline_s   silent for dead_after_s   gone, or replaced
    starting   → healthy    stays                        → dead                    → dead, over
    healthy    stays        → stale                      (stale first)             → dead, over
    stale      → healthy    stays                        → dead                    → dead, over

A dead engine is forgotten. One that was only silent may offer the same incarnation anew, and is told to do so.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rose_scheduler.deadlines import Deadlines
from rose_scheduler.events import (
    EngineAnswered,
    EngineBeat,
    EngineGone,
    EngineKind,
    EngineOffered,
    Health,
    LeaseAsked,
    Standing,
)
from rose_scheduler.limits import Limits
from rose_scheduler.mean import Mean
from rose_scheduler.pool import Pool

_Rank = tuple[bool, float, float, str]


@dataclass(slots=True)
class Engine:
    """One incarnation; `leases` are the ids of those that it holds, `why` is the reason of its health."""

    engine_id: str
    incarnation: str
    kind: EngineKind
    address: str
    max_requests: int
    weight_version: int
    heard_s: float
    counts_address: str = ""
    slots_open: int = 0
    kv_used_fraction: float = 0.0
    token_s: float = 0.0
    health: Health = Health.STARTING
    why: str = "no beat yet"
    leases: set[str] = field(default_factory=set)
    pool: Pool = field(default_factory=Pool)
    turn_s: Mean = field(default_factory=Mean)

    @property
    def life(self) -> tuple[str, str]:
        """What names it among all engines that ever were."""
        return (self.engine_id, self.incarnation)

    @property
    def slots(self) -> int:
        """Leases that it may hold now."""
        return min(self.max_requests, self.slots_open)

    @property
    def has_room(self) -> bool:
        return self.health is Health.HEALTHY and len(self.leases) < self.slots

    def may_take(self, asked: LeaseAsked) -> bool:
        """Whether a lease that is asked for so may be placed here, as soon as there is room."""
        return self.weight_version >= asked.min_version and self.incarnation not in asked.avoid

    def can_take(self, asked: LeaseAsked) -> bool:
        """Whether it may be placed here now."""
        return self.has_room and self.may_take(asked)

    @property
    def rank(self) -> _Rank:
        """Comparable: lent ones first, then the least loaded by share of slots, then of KV memory. Of one with room.

        What a lent engine has open is what serving leaves idle now; a dedicated one is there later, too.
        """
        load = len(self.leases) / self.slots
        return (self.kind is EngineKind.DEDICATED, load, self.kv_used_fraction, self.engine_id)


class Engines:
    """Every engine that is not dead, by id."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._engines: dict[str, Engine] = {}
        self._by_address: dict[str, Engine] = {}
        self._over: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._silence: Deadlines[str] = Deadlines()
        self._order: list[_Rank] = []
        self._ranks: dict[str, _Rank] = {}

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def remembered(self) -> int:
        """Entries of any kind in memory."""
        return len(self._engines) + len(self._over) + self._silence.kept

    def live(self, engine_id: str, incarnation: str) -> Engine | None:
        """That incarnation, unless it is dead."""
        engine = self._engines.get(engine_id)
        return engine if engine is not None and engine.incarnation == incarnation else None

    def with_room(self, asked: LeaseAsked) -> Iterator[Engine]:
        """Those that can take what is asked for, in rank."""
        for *_, engine_id in self._order:
            engine = self._engines[engine_id]
            if engine.can_take(asked):
                yield engine

    def offer(self, event: EngineOffered, now: float) -> tuple[EngineAnswered, list[Engine]]:
        """Take an offer: the answer, and the engines that it ended. The same offer again changes nothing."""
        over = self._over.get((event.engine_id, event.incarnation))
        if over is not None:
            return _answer(event, Standing.OVER, over), []
        same = self.live(event.engine_id, event.incarnation)
        if same is not None:
            if _facts(same) == _facts(event):
                return _answer(event, Standing.KNOWN), []
            return _answer(event, Standing.CONFLICT, "it was offered otherwise before"), []
        holder = self._engines.get(event.engine_id)
        if holder is not None and holder.kind is EngineKind.DEDICATED and event.kind is EngineKind.LENT:
            return _answer(event, Standing.CONFLICT, "one of the run's own engines has this id"), []
        replaced = {found.engine_id: found for found in self._claimed(event)}
        if len(self._engines) - len(replaced) >= self._limits.engines:
            return _answer(event, Standing.FULL, f"{self._limits.engines} engines are known"), []
        for engine in replaced.values():
            self._end(engine, f"{event.engine_id} {event.incarnation} took its place", over=True)
        engine = Engine(
            event.engine_id,
            event.incarnation,
            event.kind,
            event.address,
            event.max_requests,
            event.weight_version,
            now,
            event.counts_address,
        )
        self._engines[event.engine_id] = engine
        self._by_address[event.address] = engine
        self._silence.set(event.engine_id, now + self._limits.dead_after_s)
        return _answer(event, Standing.KNOWN), list(replaced.values())

    def beat(self, event: EngineBeat, now: float) -> EngineAnswered:
        """Believe what a live incarnation says of itself."""
        engine = self.live(event.engine_id, event.incarnation)
        if engine is None:
            over = self._over.get((event.engine_id, event.incarnation))
            if over is not None:
                return _answer(event, Standing.OVER, over)
            return _answer(event, Standing.UNKNOWN, "it is not known here, or was silent for too long")
        engine.weight_version = event.weight_version
        engine.slots_open = event.slots_open
        engine.kv_used_fraction = event.kv_used_fraction
        engine.token_s = event.token_s
        engine.heard_s = now
        engine.health = Health.HEALTHY
        engine.why = ""
        self._silence.set(event.engine_id, now + self._limits.beat_deadline_s)
        self._rank(engine)
        return _answer(event, Standing.KNOWN)

    def gone(self, event: EngineGone) -> tuple[EngineAnswered, list[Engine]]:
        """Take an engine at its word: the answer, and the engine that this ended, if it lived."""
        engine = self.live(event.engine_id, event.incarnation)
        if engine is None:
            self._remember_over(event.engine_id, event.incarnation, event.why)
            return _answer(event, Standing.OVER, event.why), []
        self._end(engine, event.why, over=True)
        return _answer(event, Standing.OVER, event.why), [engine]

    def silent(self, now: float) -> Iterator[Engine]:
        """Engines that have become stale or dead through silence."""
        for engine_id in self._silence.overdue(now):
            engine = self._engines[engine_id]
            if engine.health is Health.HEALTHY:
                engine.health = Health.STALE
                engine.why = f"no beat for {self._limits.beat_deadline_s:g} s"
                self._silence.set(engine_id, engine.heard_s + self._limits.dead_after_s)
                self._rank(engine)
            else:
                self._end(engine, f"no beat for {self._limits.dead_after_s:g} s", over=False)
            yield engine

    def next_silence_s(self) -> float | None:
        """When `silent` has something to say next, if nothing is heard."""
        return self._silence.next_s()

    def hold(self, engine: Engine, lease_id: str) -> None:
        engine.leases.add(lease_id)
        self._rank(engine)

    def release(self, engine: Engine, lease_id: str) -> None:
        engine.leases.discard(lease_id)
        self._rank(engine)

    def _claimed(self, event: EngineOffered) -> Iterator[Engine]:
        """Live engines whose id or address an offer takes."""
        for found in (self._engines.get(event.engine_id), self._by_address.get(event.address)):
            if found is not None:
                yield found

    def _end(self, engine: Engine, why: str, *, over: bool) -> None:
        engine.health = Health.DEAD
        engine.why = why
        self._rank(engine)
        self._silence.drop(engine.engine_id)
        del self._engines[engine.engine_id]
        del self._by_address[engine.address]
        if over:
            self._remember_over(engine.engine_id, engine.incarnation, why)

    def _remember_over(self, engine_id: str, incarnation: str, why: str) -> None:
        self._over[engine_id, incarnation] = why
        if len(self._over) > self._limits.engines:
            self._over.popitem(last=False)

    def _rank(self, engine: Engine) -> None:
        """Put an engine where it belongs in the order of those with room, or take it out."""
        old = self._ranks.pop(engine.engine_id, None)
        if old is not None:
            del self._order[bisect_left(self._order, old)]
        if engine.has_room:
            self._ranks[engine.engine_id] = engine.rank
            insort(self._order, engine.rank)


def _facts(of: Engine | EngineOffered) -> tuple[EngineKind, str, int, str]:
    """What stays as it was offered for as long as an incarnation lives."""
    return (of.kind, of.address, of.max_requests, of.counts_address)


def _answer(event: EngineOffered | EngineBeat | EngineGone, standing: Standing, what: str = "") -> EngineAnswered:
    return EngineAnswered(event.engine_id, event.incarnation, standing, what)
