"""Which engine takes the next turn of a trajectory. A pure core.

Rules, in this order: the engine in whose cache the trajectory's prefix is (`residency`), if it has room, or is expected
to have some before the prefix could be computed anew elsewhere; a lent engine with room, since what it has open is what
serving leaves idle; the least loaded engine with room; the waiting line, in the order of `task_order`, of which an
engine takes only what may start there (`batching`). A lease that has waited for half the time that it may wait comes
before all others.
An engine takes traffic only while it is healthy and runs at least the version asked for, and at most as many leases
as it was offered with and as it says to be open now; never a lease that avoids its incarnation.

Invariants
- Every lease asked for is answered once: granted, refused, or expired at its deadline. The same question again gets
  the same grant, never another.
- A granted lease is over once: ended, not ended in time, or lost with its engine. What is reported after that
  changes nothing.
- No lease waits that an engine could take, but for the reasons of `batching`; none at an engine where nothing runs.
- Everything remembered is bounded by `Limits` and by the slots of the engines.
- Nothing is kept elsewhere: after a restart the core is empty, and as soon as engines and askers have come again it
  places as before. Turns that are under way then are not known to it, so until they end, an engine may have more than
  its slots.

State table of a lease ("ignored": no change; each event is answered all the same)

    state     LeaseAsked again   LeaseEnded       Cancelled    its deadline     its engine dies
    waiting   ignored            ignored          → unknown    → over, Expire   (has none)
    held      the same Grant     → over           → over       → over, Expire   → over, Expire
    over      Refuse             ignored          ignored      (has none)       (has none)

A lease that is full, in conflict or over is refused and leaves no trace; a full line takes a lease in place of the last
one, if it goes before that, which is then refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from rose.driver.core import After
from rose_scheduler.batching import Batch, Batching
from rose_scheduler.engines import Engine, Engines
from rose_scheduler.events import (
    Cancelled,
    EndAnswered,
    EndVerdict,
    EngineBeat,
    EngineGone,
    EngineOffered,
    Expire,
    Grant,
    Health,
    HealthChanged,
    Lapse,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    OverAnswered,
    PlacementAction,
    PlacementEvent,
    Reason,
    Refuse,
    Tick,
    TrajectoryOver,
)
from rose_scheduler.leases import Lease, Leases
from rose_scheduler.limits import Limits
from rose_scheduler.residency import Residency
from rose_scheduler.task_order import Key
from rose_scheduler.trajectories import Trajectories
from rose_scheduler.waiting import WaitingLine
from rose_scheduler.why import Why, explain, missing


class Placement:
    """The state of one scheduler."""

    def __init__(self, limits: Limits | None = None, batching: Batching | None = None) -> None:
        self.limits = limits or Limits()
        self.engines = Engines(self.limits)
        self.leases = Leases(self.limits.ended)
        self.line = WaitingLine()
        self.trajectories = Trajectories(self.limits.trajectories)
        self.residency = Residency(self.engines, self.line, self.trajectories)
        self.batch = Batch(batching or Batching(), self.engines, self.line, self.trajectories, self.residency)
        self._tick = 0
        self._tick_s: float | None = None

    def step(self, event: PlacementEvent, now: float) -> tuple[PlacementAction, ...]:
        """Take one event at `now`; first comes what time itself has brought about."""
        happened = (*self._overdue(now), *self._react(event, now))
        return (*happened, *self._look_elsewhere(now), *self._next_tick(event, now))

    def why(self, some_id: str, now: float) -> Why | None:
        """What a trajectory, named by itself or by a lease of it, waits for; None if it is not known."""
        lease = self.leases.find(some_id)
        trajectory = self.trajectories.find(self.leases.whose(some_id) or some_id)
        if trajectory is None:
            return None
        if lease is None:
            lease = next((self.leases.find(lease_id) for lease_id in sorted(trajectory.leases)), None)
        return explain(trajectory, lease, self.engines, self.line, now)

    def remembered(self) -> dict[str, int]:
        """Entries in memory, by their kind."""
        return {
            "engines": self.engines.remembered,
            "leases": self.leases.remembered + self.line.remembered,
            "trajectories": len(self.trajectories),
            "groups": self.trajectories.groups,
        }

    def _react(self, event: PlacementEvent, now: float) -> Iterator[PlacementAction]:
        match event:
            case LeaseAsked():
                yield from self._asked(event, now)
            case LeaseEnded():
                yield from self._ended(event, now)
            case TrajectoryOver():
                yield from self._trajectory_over(event, now)
            case Cancelled():
                yield from self._cancelled(event, now)
            case EngineBeat():
                yield from self._beat(event, now)
            case EngineOffered():
                yield from self._offered(event, now)
            case EngineGone():
                answer, ended = self.engines.gone(event)
                yield answer
                for engine in ended:
                    yield from self._lost(engine, now)

    def _asked(self, event: LeaseAsked, now: float) -> Iterator[PlacementAction]:
        lease = self.leases.find(event.lease_id)
        if lease is not None:
            yield from _repeated(lease, event)
            return
        over = self.leases.how_over(event.lease_id)
        if over is not None:
            yield Refuse(event.lease_id, Reason.ENDED, f"this lease is over: {over}")
            return
        known = self.trajectories.find(event.trajectory_id)
        if known is not None:
            self.trajectories.returned(known, now)
        if known is not None and known.group.group_id != event.group_id:
            what = f"trajectory {event.trajectory_id} is of group {known.group.group_id}"
            yield Refuse(event.lease_id, Reason.CONFLICT, what)
            return
        engine = self.batch.engine_for(event, known)
        if engine is not None:
            yield self._grant(self._open(event, now), engine, now)
        elif event.deadline_s <= now:
            self.leases.remember(event, Lapse.NOT_PLACED)
            what = f"it did not wait for {missing(self.engines, event)}"
            yield Expire(event.lease_id, event.trajectory_id, Lapse.NOT_PLACED, what)
        else:
            yield from self._wait(event, now)

    def _open(self, event: LeaseAsked, now: float) -> Lease:
        trajectory = self.trajectories.open(event.trajectory_id, event.group_id, event.group_size, event.lease_id)
        trajectory.note(now, f"asked for turn {event.turn}", event.lease_id)
        return Lease(event, now, trajectory)

    def _wait(self, event: LeaseAsked, now: float) -> Iterator[PlacementAction]:
        """Take a lease into the line, if need be in place of one that would be placed after it."""
        if len(self.line) >= self.limits.waiting:
            last_id = self.line.last_behind(self._key(event, now))
            last = None if last_id is None else self.leases.find(last_id)
            if last is None:
                yield self._full(event.lease_id)
                return
            self._withdraw(last, now, "gave way to one that goes before it")
            yield self._full(last.asked.lease_id)
        lease = self._open(event, now)
        self.leases.wait(lease)
        urgent_s = now + (event.deadline_s - now) * self.batch.batching.urgent_after
        self.line.add(event, self._key(event, now), urgent_s, self.residency.line_of(event, lease.trajectory))

    def _key(self, asked: LeaseAsked, now: float) -> Key:
        return self.batch.batching.order(self.trajectories.task(asked, now))

    def _reorder(self, group_id: str) -> None:
        """Something of a group has changed that its order hangs on."""
        for entry in self.line.of_group(group_id):
            lease = self.leases.find(entry.asked.lease_id)
            assert lease is not None
            self.line.rank(entry.asked.lease_id, self._key(entry.asked, lease.asked_s))

    def _full(self, lease_id: str) -> Refuse:
        what = f"{self.limits.waiting} leases wait already"
        return Refuse(lease_id, Reason.FULL, what, self.limits.retry_after_s)

    def _grant(self, lease: Lease, engine: Engine, now: float) -> Grant:
        asked, trajectory = lease.asked, lease.trajectory
        affine = self.residency.home(trajectory) is engine
        opened = self.trajectories.granted(trajectory.group)
        grant = Grant(
            asked.lease_id,
            asked.trajectory_id,
            engine.engine_id,
            engine.incarnation,
            engine.address,
            engine.weight_version,
            now + asked.hold_s,
            affine,
            asked.token,
            engine.counts_address,
            self.trajectories.keep_rank(asked.group_id, asked.evaluation),
        )
        self.leases.grant(lease, engine, grant, now)
        self.engines.hold(engine, asked.lease_id)
        self.residency.starts(asked, trajectory, engine)
        trajectory.note(now, "granted", asked.lease_id, engine.engine_id)
        if opened:
            self._reorder(asked.group_id)
        return grant

    def _fill(self, engine: Engine, now: float) -> Iterator[Grant]:
        """Give an engine that has gained room what waits for it."""
        while engine.has_room and (lease_id := self.batch.turn_for(engine)) is not None:
            lease = self.leases.find(lease_id)
            assert lease is not None
            self.line.drop(lease_id)
            yield self._grant(lease, engine, now)

    def _look_elsewhere(self, now: float) -> Iterator[Grant]:
        """Whose engine has nothing for him any more is taken by another, if one has room."""
        while homeless := self.residency.homeless():
            for lease_id in homeless:
                lease = self.leases.find(lease_id)
                if lease is None or lease.engine is not None:
                    continue
                engine = self.batch.engine_for(lease.asked, lease.trajectory)
                if engine is not None:
                    self.line.drop(lease_id)
                    yield self._grant(lease, engine, now)

    def _ended(self, event: LeaseEnded, now: float) -> Iterator[PlacementAction]:
        lease = self.leases.find(event.lease_id)
        if lease is None or lease.engine is None:
            yield EndAnswered(event.lease_id, self.leases.verdict(event.lease_id))
            return
        yield EndAnswered(event.lease_id, EndVerdict.ENDED, lease.asked.trajectory_id)
        lease.tokens = event.tokens
        yield from self._over(lease, event.outcome, f"{event.outcome}, {event.tokens} tokens", now)

    def _trajectory_over(self, event: TrajectoryOver, now: float) -> Iterator[PlacementAction]:
        trajectory = self.trajectories.find(event.trajectory_id)
        if trajectory is None or not self.trajectories.over(trajectory):
            verdict = EndVerdict.UNKNOWN if trajectory is None else EndVerdict.DUPLICATE
            yield OverAnswered(event.trajectory_id, verdict)
            return
        yield OverAnswered(event.trajectory_id, EndVerdict.ENDED)
        trajectory.note(now, "over", "")
        home = self.residency.over(trajectory)
        self._reorder(trajectory.group.group_id)
        if home is not None:
            yield from self._fill(home, now)

    def _cancelled(self, event: Cancelled, now: float) -> Iterator[PlacementAction]:
        lease = self.leases.find(event.lease_id)
        if lease is None:
            return
        if lease.engine is None:
            self._withdraw(lease, now, "asked no longer")
        else:
            yield from self._over(lease, LeaseOutcome.ABANDONED, "granted to nobody", now)

    def _offered(self, event: EngineOffered, now: float) -> Iterator[PlacementAction]:
        known = self.engines.live(event.engine_id, event.incarnation)
        answer, replaced = self.engines.offer(event, now)
        yield answer
        for engine in replaced:
            yield from self._lost(engine, now)
        new = self.engines.live(event.engine_id, event.incarnation)
        if known is None and new is not None:
            yield HealthChanged(new.engine_id, new.incarnation, new.health, new.why)

    def _beat(self, event: EngineBeat, now: float) -> Iterator[PlacementAction]:
        engine = self.engines.live(event.engine_id, event.incarnation)
        before = None if engine is None else engine.health
        version = 0 if engine is None else engine.weight_version
        yield self.engines.beat(event, now)
        if engine is not None:
            self.residency.beats(engine, version, event.kv_tokens)
            if engine.health is not before:
                yield HealthChanged(engine.engine_id, engine.incarnation, engine.health, f"was {before}, and beats")
            yield from self._fill(engine, now)

    def _overdue(self, now: float) -> Iterator[PlacementAction]:
        for engine in self.engines.silent(now):
            if engine.health is Health.DEAD:
                yield from self._lost(engine, now)
            else:
                self.residency.shuts(engine)
                yield HealthChanged(engine.engine_id, engine.incarnation, engine.health, engine.why)
        self.line.hurry(now)  # needs no timer: it matters when something is placed, which is in a step
        # Those that wait first: the room of the others is not for who is too late himself.
        for lease in sorted(self.leases.overdue(now), key=lambda lease: lease.engine is not None):
            lapse = Lapse.NOT_PLACED if lease.engine is None else Lapse.NOT_ENDED
            yield from self._expire(lease, lapse, now)

    def _lost(self, engine: Engine, now: float) -> Iterator[PlacementAction]:
        """An engine is dead: so are its leases. Its room is gone with it."""
        yield HealthChanged(engine.engine_id, engine.incarnation, engine.health, engine.why)
        self.residency.lost(engine)
        for lease_id in sorted(engine.leases):
            lease = self.leases.find(lease_id)
            assert lease is not None
            yield from self._expire(lease, Lapse.ENGINE_LOST, now)

    def _expire(self, lease: Lease, lapse: Lapse, now: float) -> Iterator[PlacementAction]:
        asked = lease.asked
        if lease.engine is None:
            why = explain(lease.trajectory, lease, self.engines, self.line, now)
            what = f"after {now - lease.asked_s:.1f} s it still waited for {why.waits_for}"
        else:
            what = f"on {lease.engine.engine_id} for {now - lease.granted_s:.1f} s"
        yield Expire(asked.lease_id, asked.trajectory_id, lapse, what)
        yield from self._over(lease, lapse, str(lapse), now)

    def _over(self, lease: Lease, how: LeaseOutcome | Lapse, noted: str, now: float) -> Iterator[PlacementAction]:
        """An open lease is over; its room, if it had any, goes to the next in line."""
        lease_id, engine, trajectory = lease.asked.lease_id, lease.engine, lease.trajectory
        trajectory.note(now, noted, lease_id, "" if engine is None else engine.engine_id)
        self.leases.end(lease, how)
        self.line.drop(lease_id)
        if engine is not None:
            self._left(lease, engine, how, now)
        self.trajectories.close(trajectory, lease_id)
        if engine is None:
            return
        self.engines.release(engine, lease_id)
        yield from self._fill(engine, now)

    def _left(self, lease: Lease, engine: Engine, how: LeaseOutcome | Lapse, now: float) -> None:
        """A turn is off its engine, where it leaves its prefix if it came to its end there."""
        asked, trajectory = lease.asked, lease.trajectory
        if how is not LeaseOutcome.DONE:
            self.residency.breaks_off(asked, trajectory, engine)
            return
        engine.turn_s.saw(now - lease.granted_s)
        if self.trajectories.ended(trajectory, asked.context_tokens, lease.tokens, now):
            self._reorder(asked.group_id)
        self.residency.ends(asked, trajectory, engine, lease.tokens)

    def _withdraw(self, lease: Lease, now: float, noted: str) -> None:
        """A waiting lease leaves, as if it had never been asked for."""
        lease_id = lease.asked.lease_id
        lease.trajectory.note(now, noted, lease_id)
        self.leases.withdraw(lease)
        self.line.drop(lease_id)
        self.trajectories.close(lease.trajectory, lease_id)

    def _next_tick(self, event: PlacementEvent, now: float) -> Iterator[After[PlacementEvent]]:
        """One timer is out for the earliest deadline; one that an earlier deadline overtook is not listened to."""
        if isinstance(event, Tick) and event.number == self._tick:
            self._tick_s = None
        times_s = [at_s for at_s in (self.engines.next_silence_s(), self.leases.next_s()) if at_s is not None]
        if times_s and (self._tick_s is None or min(times_s) < self._tick_s):
            self._tick += 1
            self._tick_s = min(times_s)
            yield After(self._tick_s - now, Tick(self._tick))


def _repeated(lease: Lease, event: LeaseAsked) -> Iterator[PlacementAction]:
    if not lease.is_for(event):
        yield Refuse(event.lease_id, Reason.CONFLICT, f"it was asked for by {lease.asked.trajectory_id} otherwise")
    elif lease.grant is not None:
        yield lease.grant
