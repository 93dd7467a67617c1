"""The run's own engines: started, watched, brought to the newest version, replaced, offered to the scheduler.

Invariants
- Each decision is a core's: `engine_health` for lives, `versions` for weights. What is here obeys and reports.
- Whoever joins, leaves, lags or skips versions asks nothing of any other engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rose.simulator.coserving.engine import DedicatedEngine, RolloutEngine
from rose.simulator.coserving.parts import PartsDriver, To
from rose.simulator.coserving.scheduler_host import CALL_S, SchedulerHost
from rose.simulator.coserving.waits import WaitBooks
from rose.simulator.loading_engine import Answer, LoadingEngine
from rose.simulator.world import must
from rose.version_events import (
    Commit,
    CommitFailed,
    EngineJoined,
    EngineLost,
    Pinned,
    Replace,
    Retire,
    Stage,
    Staged,
    StageFailed,
    Unpinned,
    VersionAction,
)
from rose.versions import VersionState
from rose_executor.engine_health import Died, EngineHealth, GiveUp, HealthAction, Ready, Start
from rose_scheduler.events import EngineKind, EngineOffered

SLOTS = 3
BEAT_S = 0.25
LOAD_S = 0.2
NOTICE_S = 0.05
START_DEADLINE_S = 1.0
STAGE_DEADLINE_S = 0.6
COMMIT_DEADLINE_S = 0.2
RESTARTS_MAX = 2

VERSIONS = "versions"


@dataclass(slots=True)
class Odds:
    """Chances in [0, 1] that a start, a stage or commit, or one part of a stream fails, as long as there are faults."""

    start: float
    weights: float
    stream: float


class Store:
    """Which versions can be had: published, and not retired yet."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.stored: set[int] = set()
        self.pins: set[tuple[int, str]] = set()

    def publish(self) -> int:
        version = self.published[-1] + 1 if self.published else 0
        self.published.append(version)
        self.stored.add(version)
        return version

    @property
    def newest(self) -> int:
        return self.published[-1]


class Fleet:
    """`made` hears of every token as it is sampled; `died` of every incarnation that has ended."""

    def __init__(
        self,
        engine_ids: list[str],
        driver: PartsDriver,
        put: Callable[[str, EngineHealth], None],
        versions: VersionState,
        store: Store,
        host: SchedulerHost,
        waits: WaitBooks,
        odds: Odds,
        made: Callable[[RolloutEngine, int], None],
    ) -> None:
        self.engines: dict[str, DedicatedEngine] = {}
        self.incarnations: dict[str, RolloutEngine] = {}
        self.health = {engine_id: EngineHealth(RESTARTS_MAX, backoff_s=0.1) for engine_id in engine_ids}
        self.given_up: set[str] = set()
        self.starts = dict.fromkeys(engine_ids, 0)
        self.closing = False
        self._driver = driver
        self._versions = versions
        self._store = store
        self._host = host
        self._waits = waits
        self._odds = odds
        self._made = made
        self._staged: set[tuple[str, int]] = set()
        self._orders: dict[int, int] = {}
        for engine_id, health in self.health.items():
            put(health_part(engine_id), health)

    def crash(self, engine_id: str) -> None:
        """SIGKILL of one engine, if it lives; its supervisor notices soon."""
        engine = self.engines.get(engine_id)
        if engine is not None and engine.alive:
            engine.crash()
            self._driver.call(NOTICE_S, f"{engine.incarnation} is seen to be dead", partial(self._noticed, engine))

    def perform_health(self, engine_id: str, action: HealthAction) -> None:
        match action:
            case Start():
                self._start(engine_id)
            case GiveUp():
                self.given_up.add(engine_id)

    def perform_versions(self, action: VersionAction) -> None:
        self.check()
        match action:
            case Stage() | Commit():
                self._order(action)
            case Replace():
                engine = self.engines[action.engine_id]
                if engine.incarnation == action.incarnation:
                    self.crash(action.engine_id)
            case Retire():
                self._retire(action.version)

    def check(self) -> None:
        """Where the version state lets an engine be used, it runs what that says. For the moments that matter."""
        must(not self._versions.violations(), "the version state complains", self._versions.violations())
        for engine_id, engine in self.engines.items():
            if engine.alive and engine.incarnation in self.incarnations and self._versions.may_serve(engine_id):
                held = (self._versions.engine_version(engine_id), engine.weights.shards)
                must(engine.weights.serving and held[1].count(held[0] or 0) == len(held[1]), "it runs another", held)

    def _start(self, engine_id: str) -> None:
        self.starts[engine_id] += 1
        must(self.starts[engine_id] <= RESTARTS_MAX + 1, "started too often", engine_id)
        incarnation, version = f"{engine_id}.{self.starts[engine_id]}", self._store.newest
        self._pin(version, incarnation)
        wait = self._waits.begin(f"start of {incarnation}", self._driver.now + START_DEADLINE_S)
        faulty = self._driver.now < self._driver.faults.until_s and self._driver.random.random() < self._odds.start
        came = partial(self._failed if faulty else self._up, engine_id, incarnation, version, wait)
        self._driver.call(LOAD_S * (0.5 + self._driver.random.random()), f"{incarnation} has started", came)

    def _failed(self, engine_id: str, incarnation: str, version: int, wait: int) -> None:
        self._waits.end(wait)
        self._unpin(version, incarnation)
        self._driver.feed(To(health_part(engine_id), Died("it did not come up")))

    def _up(self, engine_id: str, incarnation: str, version: int, wait: int) -> None:
        self._waits.end(wait)
        must(version in self._store.stored, "an engine starts from a retired version", incarnation)
        weights = LoadingEngine(
            engine_id,
            incarnation,
            version,
            self._driver,
            self._store.stored.__contains__,
            self._answered,
            self._odds.weights,
        )
        engine = DedicatedEngine(engine_id, incarnation, weights, self._driver, self._made, self._odds.stream)
        self.engines[engine_id] = engine
        self._driver.feed(To(health_part(engine_id), Ready()))
        self._driver.feed(To(VERSIONS, EngineJoined(engine_id, incarnation, version)))
        self.incarnations[incarnation] = engine
        self._unpin(version, incarnation)
        self._beat(engine)

    def _noticed(self, engine: DedicatedEngine) -> None:
        self._host.withdraw(_offer(engine), "it died")
        self._driver.feed(To(VERSIONS, EngineLost(engine.engine_id, engine.incarnation)))
        self._driver.feed(To(health_part(engine.engine_id), Died("killed")))

    def _beat(self, engine: DedicatedEngine) -> None:
        if not engine.alive or self.closing:
            return
        self.check()
        may = self._versions.may_serve(engine.engine_id)
        version = self._versions.engine_version(engine.engine_id)
        if version is not None:
            self._driver.call(CALL_S, "", partial(self._host.beat, _offer(engine), version, SLOTS if may else 0))
        self._driver.call(BEAT_S, "", lambda: self._beat(engine))

    def _order(self, order: Stage | Commit) -> None:
        must(order.version in self._store.stored, "an order is for what is not stored", order)
        if isinstance(order, Commit):
            must((order.incarnation, order.version) in self._staged, "commit of what was not staged", order)
        engine = self.engines[order.engine_id]
        if engine.incarnation == order.incarnation:
            engine.weights.order(order)
        stage = isinstance(order, Stage)
        deadline_s = STAGE_DEADLINE_S if stage else COMMIT_DEADLINE_S
        failure = (StageFailed if stage else CommitFailed)(order.engine_id, order.version, order.order, "no answer")
        what = f"{order.incarnation} to answer order {order.order}"
        self._orders[order.order] = self._waits.begin(what, self._driver.now + deadline_s)
        self._driver.call(deadline_s, "", lambda: self._give_up(failure))

    def _give_up(self, failure: StageFailed | CommitFailed) -> None:
        wait = self._orders.pop(failure.order, None)
        if wait is not None:
            self._waits.end(wait)
            self._driver.feed(To(VERSIONS, failure))

    def _answered(self, weights: LoadingEngine, answer: Answer) -> None:
        wait = self._orders.pop(answer.order, None)
        if wait is not None:
            self._waits.end(wait)
        if isinstance(answer, Staged):
            self._staged.add((weights.incarnation, answer.version))
        self._driver.feed(To(VERSIONS, answer))

    def _pin(self, version: int, by: str) -> None:
        self._store.pins.add((version, by))
        self._driver.after(0.0, To(VERSIONS, Pinned(version, by)))

    def _unpin(self, version: int, by: str) -> None:
        self._store.pins.discard((version, by))
        self._driver.feed(To(VERSIONS, Unpinned(version, by)))

    def _retire(self, version: int) -> None:
        must(version in self._store.stored and version != self._store.newest, "retired wrongly", version)
        must(all(pinned != version for pinned, _ in self._store.pins), "retired a pinned version", version)
        for engine in self.engines.values():
            must(not engine.alive or version not in engine.weights.shards, "retired what runs", engine.incarnation)
        self._store.stored.discard(version)


def health_part(engine_id: str) -> str:
    return f"health of {engine_id}"


def _offer(engine: DedicatedEngine) -> EngineOffered:
    return EngineOffered(
        engine.engine_id, engine.incarnation, EngineKind.DEDICATED, f"at {engine.incarnation}", SLOTS, engine.version
    )
