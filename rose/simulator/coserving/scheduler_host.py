"""The process that the placement core lives in: calls reach it while it is up, and it may start anew with no memory.

Invariants, checked against the host's own books
- A lease is granted only on an incarnation that lives as far as anybody could know, that runs at least the version
  asked for, and that has room of those that this life of the scheduler knows of.
- Every question is answered once, at the latest at its deadline, as long as the process lives. No lease waits that an
  engine could take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rose.simulator.coserving.parts import PartsDriver, To
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.world import must
from rose_scheduler.events import (
    Cancelled,
    EngineAnswered,
    EngineBeat,
    EngineGone,
    EngineOffered,
    Expire,
    Grant,
    Lapse,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    PlacementAction,
    Refuse,
    Standing,
)
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement

LIMITS = Limits(beat_deadline_s=0.6, dead_after_s=1.5)
CALL_S = 0.002

Answer = Grant | Refuse | Expire | None
"""None: the connection broke."""


@dataclass(slots=True)
class _Asked:
    event: LeaseAsked
    answer: Callable[[Answer], None]
    wait: int


@dataclass(slots=True)
class _Engine:
    """What this life of the scheduler was told of an engine."""

    offered: EngineOffered
    version: int = -1
    slots: int = 0
    heard_s: float = -1e9
    held: set[str] = field(default_factory=set)


class SchedulerHost:
    """`make` makes the core of each life; `really_runs` says what an incarnation really runs, None if dead."""

    def __init__(
        self,
        driver: PartsDriver,
        put: Callable[[str, Placement], None],
        drop: Callable[[str], None],
        make: Callable[[Limits], Placement],
        really_runs: Callable[[str], int | None],
        waits: WaitBooks,
    ) -> None:
        self.up = False
        self.lives = 0
        self.granted = 0
        self.lapsed = 0
        self.core = make(LIMITS)
        self._driver = driver
        self._put, self._drop, self._make = put, drop, make
        self._really_runs = really_runs
        self._waits = waits
        self._asked: dict[str, _Asked] = {}
        self._engines: dict[str, _Engine] = {}
        self._grants: dict[str, Grant] = {}
        self._standing: EngineAnswered | None = None

    @property
    def part(self) -> str:
        return f"scheduler.{self.lives}"

    def start(self) -> None:
        """A process with an empty memory."""
        self.up = True
        self.lives += 1
        self.core = self._make(LIMITS)
        self._put(self.part, self.core)

    def kill(self) -> None:
        """Gone with all that it knew: whoever waits for an answer sees the connection break."""
        if not self.up:
            return
        self.up = False
        self._drop(self.part)
        broken, self._asked = self._asked, {}
        self._engines.clear()
        self._grants.clear()
        for asked in broken.values():
            self._waits.end(asked.wait)
            self._driver.call(CALL_S, "", partial(asked.answer, None))

    def ask(self, event: LeaseAsked, answer: Callable[[Answer], None]) -> None:
        """A question arrives; the answer travels back."""
        if not self.up:
            self._driver.call(CALL_S, "", lambda: answer(None))
            return
        before = self._asked.pop(event.lease_id, None)
        if before is not None:
            self._waits.end(before.wait)
        wait = self._waits.begin(f"{event.lease_id} asked of the scheduler", event.deadline_s)
        self._asked[event.lease_id] = _Asked(event, answer, wait)
        self._feed(event)

    def end(self, lease_id: str, outcome: LeaseOutcome, tokens: int) -> None:
        """A lease is told to be over, if anybody hears it."""
        if self.up:
            self._release(lease_id)
            self._feed(LeaseEnded(lease_id, outcome, tokens))

    def cancel(self, lease_id: str) -> None:
        """Nobody listens for the answer any more."""
        asked = self._asked.pop(lease_id, None)
        if asked is not None:
            self._waits.end(asked.wait)
            self._feed(Cancelled(lease_id))

    def beat(self, engine: EngineOffered, version: int, slots: int) -> None:
        """A beat arrives, and an offer behind it if the scheduler knows nothing of the engine."""
        if not self.up:
            return
        beat = EngineBeat(engine.engine_id, engine.incarnation, version, slots, 0.0)
        known = self._engines.get(engine.engine_id)
        if known is not None and known.offered.incarnation == engine.incarnation:
            # Before the answer, since what the beat frees is granted with it.
            known.version, known.slots, known.heard_s = version, slots, self._driver.now
        standing = self._tell(beat)
        if standing is Standing.UNKNOWN and (standing := self._tell(engine)) is Standing.KNOWN:
            self._engines[engine.engine_id] = _Engine(engine, version, slots, self._driver.now)
            self._tell(beat)

    def withdraw(self, engine: EngineOffered, why: str) -> None:
        """It is gone, and every lease that it held is over with it."""
        if not self.up:
            return
        self._tell(EngineGone(engine.engine_id, engine.incarnation, why))
        known = self._engines.get(engine.engine_id)
        if known is not None and known.offered.incarnation == engine.incarnation:
            must(not known.held, "leases outlive their engine", known)
            del self._engines[engine.engine_id]

    def perform(self, action: PlacementAction) -> None:
        """What the core of this life asks for."""
        match action:
            case EngineAnswered():
                self._standing = action
            case Grant():
                self._granted(action)
                self._answer(action.lease_id, action)
            case Refuse():
                self._answer(action.lease_id, action)
            case Expire():
                self._expired(action)

    def _feed(self, event: LeaseAsked | LeaseEnded | Cancelled) -> None:
        self._driver.feed(To(self.part, event))
        self._room_is_used()

    def _tell(self, event: EngineOffered | EngineBeat | EngineGone) -> Standing:
        self._standing = None
        self._driver.feed(To(self.part, event))
        answered: EngineAnswered | None = self._standing
        assert answered is not None
        if isinstance(event, EngineBeat):
            self._room_is_used()
        return answered.standing

    def _room_is_used(self) -> None:
        """Nobody waits for what an engine has room for."""
        for asked in self._asked.values():
            for engine in self._engines.values():
                healthy = self._driver.now - engine.heard_s < LIMITS.beat_deadline_s
                room = min(engine.slots, engine.offered.max_requests) - len(engine.held)
                fits = healthy and room > 0 and engine.version >= asked.event.min_version
                fits = fits and engine.offered.incarnation not in asked.event.avoid
                must(not fits, "a lease waits, and an engine has room for it", (asked.event.lease_id, engine.offered))

    def _granted(self, grant: Grant) -> None:
        asked, before = self._asked.get(grant.lease_id), self._grants.get(grant.lease_id)
        if before is not None:
            must(grant == before, "a lease was granted twice", (before, grant))
            return
        must(asked is not None, "a grant that nobody asked for", grant)
        assert asked is not None
        must(self._driver.now <= asked.event.deadline_s, "granted too late", grant)
        engine = self._engines.get(grant.engine_id)
        must(engine is not None and engine.offered.incarnation == grant.incarnation, "granted on the unknown", grant)
        assert engine is not None
        silent_s = self._driver.now - engine.heard_s
        must(silent_s < LIMITS.beat_deadline_s, "granted on a silent engine", (grant, silent_s))
        must(len(engine.held) < min(engine.slots, engine.offered.max_requests), "granted without room", grant)
        runs = self._really_runs(grant.incarnation)
        must(runs is None or runs >= asked.event.min_version, "granted on an engine that lags", (grant, runs))
        engine.held.add(grant.lease_id)
        self._grants[grant.lease_id] = grant
        self.granted += 1

    def _expired(self, action: Expire) -> None:
        self.lapsed += 1
        if action.lapse is Lapse.NOT_PLACED:
            self._answer(action.lease_id, action)
            return
        grant = self._grants.get(action.lease_id)
        must(grant is not None, "a lease is over that was not held", action)
        assert grant is not None
        must(action.lapse is Lapse.ENGINE_LOST or self._driver.now >= grant.until_s, "over too soon", action)
        self._release(action.lease_id)

    def _release(self, lease_id: str) -> None:
        grant = self._grants.pop(lease_id, None)
        if grant is not None and (engine := self._engines.get(grant.engine_id)) is not None:
            engine.held.discard(lease_id)

    def _answer(self, lease_id: str, answer: Answer) -> None:
        asked = self._asked.pop(lease_id, None)
        if asked is not None:
            self._waits.end(asked.wait)
            self._driver.call(CALL_S, "", lambda: asked.answer(answer))
