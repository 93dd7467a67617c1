"""A world of engines and askers around the placement core, with books of its own to hold the core against.

Nothing in it asks the core what is so: who is healthy, who holds what and who is answered follows from what was
sent, what came back, and the time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from rose.driver.core import After
from rose.errors import ContractError
from rose_scheduler.events import (
    Cancelled,
    EndAnswered,
    EndVerdict,
    EngineAnswered,
    EngineBeat,
    EngineGone,
    EngineKind,
    EngineOffered,
    Expire,
    Grant,
    Lapse,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    OverAnswered,
    PlacementAction,
    PlacementEvent,
    Reason,
    Refuse,
    Standing,
    Tick,
    TrajectoryOver,
)
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement

LIMITS = Limits(beat_deadline_s=3.0, dead_after_s=9.0, waiting=3, engines=4, trajectories=5, ended=8)


def must(holds: bool, what: str) -> None:
    if not holds:
        raise ContractError(what)


@dataclass(slots=True)
class EngineBook:
    """What one engine has said of itself and was told; `heard_s` of its last beat, None before the first."""

    offered: EngineOffered
    offered_s: float
    version: int = 0
    slots: int = 0
    kv_tokens: int = 0
    heard_s: float | None = None
    held: set[str] = field(default_factory=set)

    def healthy(self, now: float) -> bool:
        return self.heard_s is not None and now < self.heard_s + LIMITS.beat_deadline_s

    def dead(self, now: float) -> bool:
        since_s = self.offered_s if self.heard_s is None else self.heard_s
        return now >= since_s + LIMITS.dead_after_s

    def room(self, now: float) -> int:
        return min(self.offered.max_requests, self.slots) - len(self.held) if self.healthy(now) else 0


class PlacementWorld:
    """One seeded run; `run` raises ContractError where the core breaks a promise."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.core = Placement(LIMITS)
        self.engines: dict[str, EngineBook] = {}
        # One less than the core remembers: two that one offer ends may be remembered in either order.
        self.past: deque[EngineOffered] = deque(maxlen=LIMITS.engines - 1)
        self.waiting: dict[str, LeaseAsked] = {}
        self.granted: dict[str, Grant] = {}
        self.over: dict[str, str] = {}
        names = ("granted", "expired", "refused", "ended", "restarts", "lost", "cancelled", "affine", "priced", "done")
        self.counts = dict.fromkeys(names, 0)
        self._timers: list[tuple[float, int]] = []
        self._drawn = 0
        self.ended = 0
        """Whose turn ended last."""

    def run(self, happenings: int = 80) -> None:
        for _ in range(happenings):
            self._pass(self.random.choice((0.0, 0.01, 0.1, 0.5, 2.0)))
            self._happen()
            self._room_is_used()
        self._calm()

    def feed(self, event: PlacementEvent) -> list[PlacementAction]:
        """Step the core, keep the books, and hold the two against each other."""
        self._silence()
        answers = []
        for action in self.core.step(event, self.now):
            if isinstance(action, After):
                must(action.delay_s >= 0, f"a timer in the past: {action}")
                heapq.heappush(self._timers, (self.now + action.delay_s, action.event.number))
            else:
                answers.append(action)
                self._book(action)
        self._check()
        return answers

    def _happen(self) -> None:
        kinds = {
            self._offer: 3,
            self._beat: 12,
            self._gone: 1,
            self._old_engine: 1,
            self._ask: 14,
            self._ask_again: 3,
            self._end: 10,
            self._end_again: 2,
            self._cancel: 2,
            self._trajectory_over: 0.5,
            self._restart: 0.4,
        }
        (happening,) = self.random.choices(list(kinds), list(kinds.values()))
        happening()

    def _pass(self, seconds: float) -> None:
        """Let time go by; the core's own timers ring when they are due, or late, as a busy process would."""
        until_s = self.now + seconds
        while self._timers and self._timers[0][0] <= until_s:
            due_s, number = heapq.heappop(self._timers)
            self.now = max(self.now, due_s)
            self.feed(Tick(number))
            self._room_is_used()
        self.now = until_s

    # What happens.

    def _offer(self) -> None:
        name = self.random.choice("abcdef")
        self._drawn += 1
        kind = self.random.choice((EngineKind.DEDICATED, EngineKind.LENT))
        address = f"at {self.random.choice('abcdefg')}"
        event = EngineOffered(name, f"{self._drawn}", kind, address, self.random.randint(1, 3), self._version())
        self._send_offer(event)

    def _send_offer(self, event: EngineOffered) -> Standing:
        (answer,) = [one for one in self.feed(event) if isinstance(one, EngineAnswered)]
        if answer.standing is Standing.KNOWN and self._live(event) is None:
            for old in [book.offered for book in self.engines.values() if _same_place(book.offered, event)]:
                self._lose(old.engine_id)
            self.engines[event.engine_id] = EngineBook(event, self.now)
        return answer.standing

    def _beat(self) -> None:
        if self.engines:
            book = self.random.choice(list(self.engines.values()))
            event = EngineBeat(
                book.offered.engine_id,
                book.offered.incarnation,
                max(book.version, self._version()),
                self.random.choice((0, 1, 2, 3, 3, 3)),
                self.random.random(),
                self.random.choice((0, 30, 90, 200)),
                self.random.choice((0.0, 0.1, 0.1)),
            )
            self._send_beat(event, book)

    def _send_beat(self, event: EngineBeat, book: EngineBook) -> None:
        known = not book.dead(self.now)
        if known:  # before the answer, since what the beat frees is granted with it
            book.version, book.slots, book.heard_s = event.weight_version, event.slots_open, self.now
            book.kv_tokens = event.kv_tokens
        (answer,) = [one for one in self.feed(event) if isinstance(one, EngineAnswered)]
        must((answer.standing is Standing.KNOWN) == known, f"{event} is answered with {answer}")
        if not known:
            must(answer.standing is Standing.UNKNOWN, f"a silent engine is told {answer.standing}")
            must(self._send_offer(book.offered) in (Standing.KNOWN, Standing.FULL), "a silent engine cannot come back")

    def _gone(self) -> None:
        if self.engines:
            offered = self.random.choice(list(self.engines.values())).offered
            self.feed(EngineGone(offered.engine_id, offered.incarnation, "told to go"))
            dead = self.engines[offered.engine_id].dead(self.now)
            self._lose(offered.engine_id)
            if dead:  # it is remembered all the same, because it said so itself
                self.past.append(offered)

    def _old_engine(self) -> None:
        """News of an incarnation that is over arrives late: the newest few of these are recognised."""
        if self.past:
            old = self.random.choice(self.past)
            late = self.random.choice((old, EngineBeat(old.engine_id, old.incarnation, 9, 9, 0.0)))
            (answer,) = [one for one in self.feed(late) if isinstance(one, EngineAnswered)]
            must(answer.standing is Standing.OVER, f"{late} is answered with {answer}")

    def _ask(self) -> None:
        for _ in range(self.random.choice((1, 1, 4))):
            self._ask_one()

    def _ask_one(self) -> None:
        self._drawn += 1
        number = self.random.choice((self.random.randint(0, 11), self.ended))
        wait_s = self.random.choice((0.0, 0.05, 1.0, 5.0, 20.0))
        hold_s = self.random.choice((0.5, 5.0, 30.0))
        event = LeaseAsked(
            f"lease {self._drawn}",
            f"trajectory {number}",
            f"group {number // 3}",
            self.random.randint(0, 2),
            self.random.choice((5, 10, 20, 40)),
            self._version(),
            self.now + wait_s,
            hold_s,
            f"token {self._drawn}",
            tuple(book.offered.incarnation for book in self.engines.values() if self.random.random() < 0.1),
            group_size=3,
            evaluation=number > 10,
        )
        self._send_ask(event)

    def _send_ask(self, event: LeaseAsked) -> None:
        self.waiting.setdefault(event.lease_id, event)
        self.feed(event)

    def _ask_again(self) -> None:
        lease_ids = sorted({*self.waiting, *self.granted})
        if lease_ids:
            lease_id = self.random.choice(lease_ids)
            before = self.granted.get(lease_id)
            event = self.waiting.get(lease_id)
            if before is not None:
                group = self._group(before.trajectory_id)
                event = LeaseAsked(lease_id, before.trajectory_id, group, 1, 10, 0, 1e9, 1.0, "another")
                answers = self.feed(event)
                changed = lease_id not in self.granted
                must(changed or before in answers or any(isinstance(a, Refuse) for a in answers), f"{answers}")
            elif event is not None:
                self.feed(replace(event, token="another", deadline_s=event.deadline_s + 1.0))

    def _end(self) -> None:
        if self.granted:
            lease_id = self.random.choice(list(self.granted))
            self._silence()
            event = LeaseEnded(lease_id, self.random.choice((LeaseOutcome.DONE, LeaseOutcome.DONE, *LeaseOutcome)), 3)
            grant = self.granted[lease_id]
            still_held = lease_id in self._held() and self.now < grant.until_s
            if still_held:
                self._free(lease_id)
                self.over[lease_id] = "ended"
                self.counts["ended"] += 1
                self.ended = int(grant.trajectory_id.split()[1])
            (answer,) = [one for one in self.feed(event) if isinstance(one, EndAnswered)]
            must((answer.verdict is EndVerdict.ENDED) == still_held, f"{event} is answered with {answer}")

    def _end_again(self) -> None:
        if self.over:
            event = LeaseEnded(self.random.choice(list(self.over)), LeaseOutcome.DONE, 3)
            (answer,) = [one for one in self.feed(event) if isinstance(one, EndAnswered)]
            must(answer.verdict is not EndVerdict.ENDED, f"{event} counts twice")

    def _trajectory_over(self) -> None:
        trajectory_id = f"trajectory {self.random.randint(0, 11)}"
        (answer,) = [one for one in self.feed(TrajectoryOver(trajectory_id)) if isinstance(one, OverAnswered)]
        self.counts["done"] += answer.verdict is EndVerdict.ENDED
        (again,) = [one for one in self.feed(TrajectoryOver(trajectory_id)) if isinstance(one, OverAnswered)]
        must(again.verdict is not EndVerdict.ENDED, f"{trajectory_id} is over twice")

    def _cancel(self) -> None:
        if self.waiting:
            lease_id = self.random.choice(list(self.waiting))
            self.counts["cancelled"] += 1
            self.feed(Cancelled(lease_id))
            self.waiting.pop(lease_id, None)

    def _restart(self) -> None:
        """The process is killed and started again: engines are told to come again, askers ask again."""
        self.counts["restarts"] += 1
        self.core = Placement(LIMITS)
        self._timers.clear()
        self.past.clear()
        self.over |= dict.fromkeys(self.granted, "forgotten")
        self.granted.clear()
        books, self.engines = list(self.engines.values()), {}
        for book in books:
            event = EngineBeat(book.offered.engine_id, book.offered.incarnation, book.version, book.slots, 0.0)
            (answer,) = [one for one in self.feed(event) if isinstance(one, EngineAnswered)]
            must(answer.standing is Standing.UNKNOWN, f"a core that knows nothing says {answer.standing}")
            self._send_offer(book.offered)
        for asked in list(self.waiting.values()):
            self._send_ask(asked)

    def _calm(self) -> None:
        """Engines beat, turns end, nobody asks: everything is answered, and what is long enough is granted."""
        self._send_offer(EngineOffered("last", "last", EngineKind.DEDICATED, "at last", 2, 9))
        for _ in range(60):
            for book in list(self.engines.values()):
                self._send_beat(EngineBeat(book.offered.engine_id, book.offered.incarnation, 9, 3, 0.0), book)
            for lease_id in list(self._held()):
                self._free(lease_id)
                self.over[lease_id] = "ended"
                self.feed(LeaseEnded(lease_id, LeaseOutcome.DONE, 3))
            self._pass(0.5)
        must(not self.waiting, f"never answered: {self.waiting}")
        must(not self._held(), f"still held: {self._held()}")
        must(len(self.core.leases) == 0 and len(self.core.line) == 0, "the core still holds leases")

    # The books.

    def _book(self, action: PlacementAction) -> None:
        match action:
            case Grant():
                self._granted(action)
            case Refuse():
                if action.reason is Reason.FULL:
                    must(action.lease_id in self.waiting, f"{action} of one that does not wait")
                    del self.waiting[action.lease_id]
                    self.counts["refused"] += 1
                else:
                    must(action.lease_id not in self.waiting, f"{action} of one that waits")
            case Expire():
                self._expired(action)

    def _granted(self, grant: Grant) -> None:
        if grant.lease_id in self.granted:
            must(grant == self.granted[grant.lease_id], f"a second grant: {grant}")
            return
        asked = self.waiting.pop(grant.lease_id, None)
        must(asked is not None and grant.lease_id not in self.over, f"{grant} of one that does not wait")
        assert asked is not None
        must(self.now <= asked.deadline_s, f"{grant} after its deadline")
        must(grant.token == asked.token, f"{grant} with another's token")
        book = self.engines.get(grant.engine_id)
        must(book is not None and book.offered.incarnation == grant.incarnation, f"{grant} on a dead engine")
        assert book is not None
        must(book.healthy(self.now), f"{grant} on an engine that does not beat")
        must(grant.incarnation not in asked.avoid, f"{grant} on what it avoids")
        must(book.version >= asked.min_version, f"{grant} on version {book.version}, not {asked.min_version}")
        must(book.room(self.now) > 0, f"{grant} on an engine with {len(book.held)} leases and {book.slots} slots")
        must((grant.address, grant.weight_version) == (book.offered.address, book.version), f"{grant} is not {book}")
        book.held.add(grant.lease_id)
        self.granted[grant.lease_id] = grant
        self.counts["granted"] += 1
        self.counts["affine"] += grant.affine

    def _expired(self, action: Expire) -> None:
        if action.lapse is Lapse.NOT_PLACED:
            asked = self.waiting.pop(action.lease_id, None)
            must(asked is not None and self.now >= asked.deadline_s, f"{action} too early, or of nobody")
            self.counts["expired"] += 1
        else:
            must(action.lease_id in self.granted, f"{action} of one that is not held")
            if action.lapse is Lapse.NOT_ENDED:
                must(self.now >= self.granted[action.lease_id].until_s, f"{action} too early")
            else:
                self.counts["lost"] += 1
            self._free(action.lease_id)
        self.over[action.lease_id] = "expired"

    def _silence(self) -> None:
        """Dead engines hold nothing; the core says so itself, at its next step."""
        for name in [name for name, book in self.engines.items() if book.dead(self.now)]:
            book = self.engines[name]
            book.slots = 0

    def _lose(self, engine_id: str) -> None:
        book = self.engines.pop(engine_id)
        if not book.dead(self.now):
            self.past.append(book.offered)
        must(not book.held, f"{engine_id} is over, and {book.held} were not said to be lost")

    def _free(self, lease_id: str) -> None:
        del self.granted[lease_id]
        for book in self.engines.values():
            book.held.discard(lease_id)

    def _held(self) -> set[str]:
        return {lease_id for book in self.engines.values() for lease_id in book.held}

    def _live(self, event: EngineOffered) -> EngineBook | None:
        book = self.engines.get(event.engine_id)
        return book if book is not None and book.offered == event and not book.dead(self.now) else None

    def _check(self) -> None:
        late = [asked for asked in self.waiting.values() if asked.deadline_s <= self.now]
        must(not late, f"not answered at their deadline: {late}")
        core = self.core
        must(len(core.line) <= LIMITS.waiting, "too many wait")
        must(len(core.engines) <= LIMITS.engines, "too many engines")
        open_max = LIMITS.waiting + 3 * LIMITS.engines
        must(len(core.leases) <= open_max, "too many leases")
        most = {  # deadlines that were dropped may stand twice, and 64 more
            "engines": 2 * LIMITS.engines + 2 * LIMITS.engines + 65,
            "leases": open_max + LIMITS.ended + 2 * open_max + 65 + 3 * LIMITS.waiting + 65,
            "trajectories": LIMITS.trajectories + open_max,
            "groups": LIMITS.trajectories + open_max,
        }
        for kind, entries in core.remembered().items():
            must(entries <= most[kind], f"{entries} {kind} are remembered")
        self._check_pools()

    def _check_pools(self) -> None:
        """Whoever runs is in his engine's pool, and nobody's prefix is in two."""
        resident: list[str] = []
        for engine in self.core.engines:
            pool = engine.pool
            must(pool.running == len(engine.leases), f"{pool.running} run on {engine.engine_id}, not {engine.leases}")
            within = not pool.capacity_tokens or pool.running_tokens + pool.resident_tokens <= pool.capacity_tokens
            must(within or not pool.residents, f"{engine.engine_id} holds more than it has")
            resident += [f"trajectory {one}" for one in range(12) if pool.resident(f"trajectory {one}")]
        must(len(resident) == len(set(resident)), f"in two pools: {resident}")

    def _room_is_used(self) -> None:
        for asked in self.waiting.values():
            for book in self.engines.values():
                fits = book.room(self.now) > 0 and book.version >= asked.min_version
                fits = fits and book.offered.incarnation not in asked.avoid
                home = self.core.residency.home(self.core.trajectories.find(asked.trajectory_id))
                if fits and ((book.kv_tokens and book.held) or home is not None):
                    self.counts["priced"] += 1
                    continue
                must(not fits, f"{asked.lease_id} waits, and {book.offered.engine_id} has room for it")

    def _version(self) -> int:
        """Rises with time; some are behind, some ask for the next."""
        return max(0, int(self.now / 8) + self.random.choice((-1, 0, 0, 0, 1)))

    def _group(self, trajectory_id: str) -> str:
        return f"group {int(trajectory_id.split()[1]) // 3}"


def _same_place(old: EngineOffered, new: EngineOffered) -> bool:
    return old.engine_id == new.engine_id or old.address == new.address


def runs(seeds: int) -> Iterator[PlacementWorld]:
    """Worlds that have run; a failing one is named by its seed."""
    for seed in range(seeds):
        world = PlacementWorld(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}, at {world.now:.3f} s")
            raise
        yield world
