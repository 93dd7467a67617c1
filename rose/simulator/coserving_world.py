"""The whole system in one world: a serving engine with its guest on one core, an executor, engines of the run's own, a
scheduler, a store of versions, trajectories and their training; and every fault that there is between them.

The product's cores decide: `guest_rules` with `slack` and `step_profile`, `quota`, `serving_steps`, `engine_health`,
`versions`, `placement`, `ledger`, `alarm`, and the records. What surrounds them is in `rose.simulator.coserving`.

What must hold, by the world's own books (where: each module names its own)
- Serving first: `executor`, `shared_core`. An engine dies, an executor dies, serving dies: the guest stops in time.
- Tokens trained are the tokens sampled, each under the version that it is stamped with: `chain`, `training`.
- No lease on an engine that lags, is silent or has no room: `scheduler_host`.
- Nothing vanishes: `token_books`, at each booking and when all is over.
- Nobody waits beyond a deadline, and the world ends: `waits`, and here.
- Engines join, leave, lag and skip versions by themselves, and at last run the newest: `fleet`, `follower`, and here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.ledger import TokenLedger
from rose.records import Purpose
from rose.simulator.coserving.board import SimulatedBoard
from rose.simulator.coserving.engine import RolloutEngine
from rose.simulator.coserving.executor import LendingExecutor
from rose.simulator.coserving.fleet import VERSIONS, Fleet, Odds, Store, health_part
from rose.simulator.coserving.parts import By, Parts, PartsDriver, To
from rose.simulator.coserving.player import Surroundings
from rose.simulator.coserving.scheduler_host import SchedulerHost
from rose.simulator.coserving.serving_engine import ServingEngine
from rose.simulator.coserving.shared_core import SharedCore
from rose.simulator.coserving.token_books import LEDGER, TokenBooks
from rose.simulator.coserving.training import ALARM, Training
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.world import must
from rose.slo import Slo
from rose.trainer.alarm import AlarmSettings, MalformedAlarm
from rose.versions import VersionState
from rose_executor.engine_health import Wanted
from rose_executor.guest_rules import GuestRules
from rose_executor.kv_budget import KvShare
from rose_executor.slack import SlackPolicy
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement

FAULTS_UNTIL_S = 2.0
LATE_S_MAX = 1.0
CALM_S = 1.3
OVER_S = 60.0
COUNT_EVERY_S = 0.25
SLO = Slo(ttft_s=0.4, tpot_s=0.08)


@dataclass(frozen=True, slots=True)
class Cores:
    """What makes each core of the product; a mutant stands in for one here."""

    rules: Callable[[SlackPolicy, KvShare], GuestRules] = GuestRules
    placement: Callable[[Limits], Placement] = Placement
    ledger: Callable[[], TokenLedger] = TokenLedger
    versions: Callable[[], VersionState] = VersionState
    alarm: Callable[[AlarmSettings], MalformedAlarm] = MalformedAlarm


class CoservingWorld:
    """One run, with a few groups of trajectories."""

    def __init__(self, seed: int, cores: Cores | None = None) -> None:
        cores = cores or Cores()
        self.random = Random(seed)
        plan = FaultPlan.drawn(self.random, FAULTS_UNTIL_S)
        self.plan = replace(plan, late_s=min(plan.late_s, LATE_S_MAX))
        self.parts, self.waits, self.store = Parts(), WaitBooks(), Store()
        self.driver: PartsDriver = VirtualDriver(
            self.parts, self._perform, self._check, world="coserving", seed=seed, random=self.random, faults=self.plan
        )
        chance = self.random.choice
        self.odds = Odds(start=chance((0.0, 0.2)), weights=chance((0.0, 0.05, 0.3)), stream=self.plan.drop)
        ledger, versions = cores.ledger(), cores.versions()
        self.parts.put(LEDGER, ledger)
        self.parts.put(VERSIONS, versions)
        self.ledger, self.versions = ledger, versions
        self.books = TokenBooks(ledger, self.driver)
        self.board = SimulatedBoard()
        interference = chance((1.0, 0.1, 0.02))
        self.core = SharedCore(self.driver, interference, chance((0.02, 0.002, 0.0002)))
        self.serving = ServingEngine(self.core, self.board, self.driver)
        self.host = SchedulerHost(
            self.driver, self.parts.put, self.parts.drop, cores.placement, self._really_runs, self.waits
        )
        engine_ids = [f"engine-{n}" for n in range(self.random.randint(1, 2))]
        self.fleet = Fleet(
            engine_ids,
            self.driver,
            self.parts.put,
            versions,
            self.store,
            self.host,
            self.waits,
            self.odds,
            self._made,
        )
        policy = SlackPolicy(SLO, tokens_max=64, seqs_max=8, interference=interference)
        self._severed_until_s = 0.0
        self.executor = LendingExecutor(
            self.parts,
            self.driver,
            self.board,
            self.core,
            policy,
            cores.rules,
            self.store,
            self.host,
            self.waits,
            self.odds,
            lambda: self.driver.now < self._severed_until_s,
            self._made,
        )
        self.training = Training(self.driver, self.store, self.books, cores.alarm(ALARM), chance((0.0, 0.3)))
        self.around = Surroundings(
            self.driver,
            self.host,
            self.executor,
            self.books,
            self.waits,
            self._find,
            self.training.min_version,
            self.training.acted,
        )
        self._groups_left = self.random.randint(2, 4)
        self._flooded = chance((0.0, 0.0, 1.0))
        self._last_guest: RolloutEngine | None = None
        self.guest_tokens = 0

    def run(self) -> None:
        """Play to the end. Raises SimulationFailed."""
        self.driver.call(0.0, "all begins", self._begin)
        self._plan_faults()
        quiet_s = FAULTS_UNTIL_S + (self.plan.late_s if self.plan.late else 0.0)  # by then what is late has come
        while self.driver.now < max(quiet_s, self._severed_until_s) or (self._playing and self.driver.now < OVER_S):
            self.driver.run(self.driver.now + 0.5)
        self.driver.call(0.0, "trajectories are over", self._check_over)
        self.driver.call(CALM_S, "all is calm", self._check_calm)
        self.driver.call(CALM_S, "the run ends", self._close)
        self.driver.run(self.driver.now + CALM_S)

    def trace(self) -> Iterator[str]:
        return self.driver.trace()

    def fingerprint(self) -> str:
        return self.driver.fingerprint()

    # What happens

    @property
    def _playing(self) -> bool:
        return self._groups_left > 0 or not self.training.over

    def _begin(self) -> None:
        self.training.publish()
        self.host.start()
        self.executor.start()
        for engine_id in self.fleet.health:
            self.driver.feed(To(health_part(engine_id), Wanted()))
        self._serve()
        self._count()
        for number in range(self._groups_left):
            purpose = Purpose.EVALUATION if number == 2 else Purpose.TRAIN
            size = self.random.randint(2, 4)
            begin = partial(self._begin_group, f"g{number}", size, purpose)
            self.driver.call(self.random.random() * 1.5, "", begin)

    def _begin_group(self, group_id: str, size: int, purpose: Purpose) -> None:
        self._groups_left -= 1
        self.training.begin_group(group_id, size, purpose, self.around)

    def _serve(self) -> None:
        """Bursts of users, and pauses; now and then more than the engine can take for a while."""
        for _ in range(self.random.choices((1, 2, 6, 40), (4, 4, 4, self._flooded))[0]):
            prompt, outputs = self.random.randint(8, 100), self.random.randint(2, 10)
            self.driver.call(self.random.random() * 0.3, "", partial(self.serving.request, prompt, outputs))
        if not self.executor.closing:
            self.driver.call(0.2 + self.random.random() * 0.8, "", self._serve)

    def _count(self) -> None:
        """The run reads its own engines' pages, and asks the executor for those of its guests."""
        self.books.read(engine.page for engine in self.fleet.incarnations.values())
        if self.executor.up:
            self.books.read(guest.page for guest in self.executor.engines.values())
        if not self.executor.closing:
            self.driver.call(COUNT_EVERY_S, "", self._count)

    # Faults

    def _plan_faults(self) -> None:
        """Each kind of fault in its own rhythm, or not at all; at times a guest that obeys nobody."""
        rarer = replace(self.plan, crashes_per_s=self.plan.crashes_per_s / 2)
        for engine_id in self.fleet.health:
            for at_s, _ in self.plan.crashes(self.random):
                self.driver.call(at_s, f"{engine_id} dies", partial(self.fleet.crash, engine_id))
        for at_s, _ in rarer.crashes(self.random):
            self.driver.call(at_s, "the guest dies", self.executor.crash_guest)
        for at_s, down_s in rarer.crashes(self.random):
            self.driver.call(at_s, "the executor dies", partial(self._kill_executor, 0.3 + down_s))
        for at_s, down_s in rarer.crashes(self.random):
            self.driver.call(at_s, "the scheduler dies", partial(self._kill_scheduler, down_s))
        for at_s, down_s in rarer.crashes(self.random):
            self.driver.call(at_s, "serving dies", partial(self._kill_serving, down_s * 2))
        for at_s, down_s in self.plan.crashes(self.random):
            self.driver.call(at_s, "transfers are severed", partial(self._sever, down_s * 2))
        if self.random.random() < 0.1:
            at_s = 0.5 + self.random.random()
            self.driver.call(at_s, "the guest obeys nobody, and serving dies", self._go_deaf)

    def _kill_executor(self, down_s: float) -> None:
        if self.executor.up:
            self.executor.kill(self.random.random() * self.random.choice((0.1, 2.0)))
            self.driver.call(down_s, "the executor starts again", self.executor.start)

    def _kill_scheduler(self, down_s: float) -> None:
        if self.host.up:
            self.host.kill()
            self.driver.call(down_s, "the scheduler starts again", self.host.start)

    def _kill_serving(self, down_s: float) -> None:
        if self.serving.alive:
            self.serving.crash()
            self.driver.call(down_s, "serving starts again", self.serving.start)

    def _sever(self, down_s: float) -> None:
        self._severed_until_s = self.driver.now + down_s

    def _go_deaf(self) -> None:
        if self.executor.guest is not None:
            self.executor.guest.deaf = True
            self._kill_serving(3.0)

    # What the cores ask for

    def _perform(self, by: By) -> Sequence[To]:
        part, action = by.part, by.action
        if part.startswith("rules"):
            self.executor.perform_rules(action)
        elif part == self.host.part:
            self.host.perform(action)
        elif part == VERSIONS:
            self.fleet.perform_versions(action)
        elif part == self.executor.part:
            self.executor.perform_health(action)
        else:
            self.fleet.perform_health(part.removeprefix(health_part("")), action)
        return ()

    def _made(self, engine: RolloutEngine, version: int) -> None:
        must(version in self.store.published, "a token of no version", (engine.incarnation, version))
        self.books.made += 1
        self.fleet.check()
        self.guest_tokens += engine.engine_id == "guest"

    def _find(self, incarnation: str) -> RolloutEngine:
        return self.executor.engines.get(incarnation) or self.fleet.incarnations[incarnation]

    def _really_runs(self, incarnation: str) -> int | None:
        engine = self._find(incarnation)
        return engine.version if engine.alive else None

    # What must hold

    def _check(self) -> None:
        self.waits.check(self.driver.now)

    def _check_over(self) -> None:
        must(not self._playing, "trajectories do not end", self.waits.open())
        self.training.publish()  # an engine that was left lagging comes back with the next version
        self._last_guest = self.executor.guest if self.executor.up else None

    def _check_calm(self) -> None:
        """A while after the last trajectory: every engine that is there runs the newest version."""
        newest = self.store.newest
        for engine_id, engine in self.fleet.engines.items():
            if engine_id not in self.fleet.given_up:
                must(engine.alive and engine.version == newest, "an engine is left behind", (engine_id, engine.version))
        guest = self._last_guest
        if guest is not None and guest.alive:
            must(guest.version == newest, "the guest is left behind", (guest.incarnation, guest.version))
        must(len(self.host.core.leases) == 0, "leases are open for ever", self.host.core.remembered())
        self.executor.closing = self.fleet.closing = True

    def _close(self) -> None:
        """The run ends: engines end, and their pages have the last word."""
        for engine in self.fleet.engines.values():
            engine.crash()
        self.executor.crash_guest()
        self.books.close(engine.page for engine in (*self.fleet.incarnations.values(), *self.executor.engines.values()))
