"""A world for the version state: a publisher, engines that load shard by shard, a supervisor, a faulty network.

What must hold, by the world's own books
- At every happening: an engine that serves holds one published version on all shards; where the core says
  that an engine may serve, it does, with exactly the version that the core names.
- A commit is ordered only after that engine staged that version. A version is retired only if no engine
  runs it, nobody pinned it and it is not among the last ones; it is never asked for afterwards.
- When faults have stopped: every engine serves the newest version and only the last ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.simulator.loading_engine import Answer, LoadingEngine, VersionDriver
from rose.simulator.world import must
from rose.version_events import (
    Commit,
    CommitFailed,
    EngineJoined,
    EngineLost,
    Pinned,
    Published,
    Replace,
    Retire,
    Stage,
    Staged,
    StageFailed,
    Unpinned,
    VersionAction,
    VersionEvent,
)
from rose.versions import VersionState

FAULTS_UNTIL_S = 4.0
LAST_PUBLISHED_S = 8.0
QUIET_S = 20.0
KEEP = 2
STAGE_DEADLINE_S = 1.0
COMMIT_DEADLINE_S = 0.2
NOTICE_S = 0.05
LOAD_S = 0.3


class VersionWorld:
    """One run of one to four engines around `versions`."""

    def __init__(self, seed: int, versions: VersionState | None = None) -> None:
        self.versions = VersionState(keep=KEEP) if versions is None else versions
        self.random = Random(seed)
        faults = FaultPlan.drawn(self.random, FAULTS_UNTIL_S)
        self.driver: VersionDriver = VirtualDriver(
            self.versions, self._perform, self._check, world="versions", seed=seed, random=self.random, faults=faults
        )
        self._fails = self.random.choice((0.0, 0.05, 0.3))
        self._publish_every_s = self.random.choice((0.1, 0.4, 1.5))
        self._engine_ids = [f"engine-{n}" for n in range(self.random.randint(1, 4))]
        self._crash_times = {engine_id: faults.crashes(self.random) for engine_id in self._engine_ids}
        self._engines: dict[str, LoadingEngine] = {}
        self._known: dict[str, str] = {}
        self._told_s: dict[str, float] = {}
        self._starts = 0
        self._published: list[int] = []
        self._stored: set[int] = set()
        self._pins: set[tuple[int, str]] = set()
        self._staged: set[tuple[str, int]] = set()
        self._answered: set[int] = set()

    def run(self) -> None:
        """Play to the end. Raises SimulationFailed."""
        self.driver.call(0.0, "", self._publish_regularly)
        for engine_id in self._engine_ids:
            self.driver.call(self.random.random(), f"{engine_id} is wanted", partial(self._start, engine_id))
            for at_s, down_s in self._crash_times[engine_id]:
                self.driver.call(at_s, "", partial(self._crash, engine_id, down_s))
        self.driver.call(self.random.random() * FAULTS_UNTIL_S, "", self._evaluate)
        self.driver.call(LAST_PUBLISHED_S, "the last version", self._publish)
        self.driver.call(QUIET_S, "all is quiet", self._check_quiet)
        self.driver.run(QUIET_S)

    def trace(self) -> Iterator[str]:
        return self.driver.trace()

    def fingerprint(self) -> str:
        return self.driver.fingerprint()

    # Publisher and evaluation

    def _publish_regularly(self) -> None:
        self._publish()
        delay_s = self._publish_every_s * (0.5 + self.random.random())
        if self.driver.now + delay_s < FAULTS_UNTIL_S:
            self.driver.call(delay_s, "", self._publish_regularly)

    def _publish(self) -> None:
        version = self._published[-1] + self.random.randint(1, 2) if self._published else 0
        self._published.append(version)
        self._stored.add(version)
        self.driver.feed(Published(version, f"hash of {version}"))

    def _evaluate(self) -> None:
        version = self.random.choice(sorted(self._stored))
        self._pin(version, "evaluation")
        self.driver.call(self.random.random() * 3, "", lambda: self._unpin(version, "evaluation"))

    def _pin(self, version: int, by: str) -> None:
        self._pins.add((version, by))
        self.driver.feed(Pinned(version, by))

    def _unpin(self, version: int, by: str) -> None:
        self._pins.discard((version, by))
        self.driver.feed(Unpinned(version, by))

    # Supervisor

    def _start(self, engine_id: str) -> None:
        """Start a new incarnation from the newest version, which stays pinned until it has joined."""
        self._starts += 1
        incarnation = f"{engine_id}.{self._starts}"
        version = self._published[-1]
        self._pin(version, incarnation)
        self.driver.call(
            LOAD_S * (0.5 + self.random.random()),
            f"{incarnation} is up with {version}",
            lambda: self._up(engine_id, incarnation, version),
        )

    def _up(self, engine_id: str, incarnation: str, version: int) -> None:
        must(version in self._stored, "an engine starts from a retired version", (incarnation, version))
        self._engines[engine_id] = LoadingEngine(
            engine_id, incarnation, version, self.driver, self._stored.__contains__, self._answer, self._fails
        )

        def joined() -> None:
            if self._engines[engine_id].incarnation == incarnation:
                self._known[engine_id] = incarnation
            self.driver.feed(EngineJoined(engine_id, incarnation, version))
            self._unpin(version, incarnation)

        self._report(engine_id, f"{incarnation} joined", joined)

    def _crash(self, engine_id: str, down_s: float) -> None:
        engine = self._engines.get(engine_id)
        if engine is not None and engine.alive:
            self._end(engine, down_s)

    def _end(self, engine: LoadingEngine, down_s: float) -> None:
        engine.alive = False
        lost = EngineLost(engine.engine_id, engine.incarnation)
        self._report(engine.engine_id, f"{engine.incarnation} is gone", lambda: self.driver.feed(lost))
        self.driver.call(NOTICE_S + down_s, "", lambda: self._start(engine.engine_id))

    def _report(self, engine_id: str, what: str, arrival: Callable[[], None]) -> None:
        """The supervisor lives beside the core: its news may be late or come again later, but in order at first."""
        late_s = NOTICE_S + self.driver.faults.lateness_s(self.random, self.driver.now)
        at_s = max(self.driver.now + late_s, self._told_s.get(engine_id, 0.0))
        self._told_s[engine_id] = at_s
        self.driver.call(at_s - self.driver.now, what, arrival)
        if self.driver.faults.duplicated(self.random, self.driver.now):
            self.driver.call(at_s - self.driver.now + self.random.random(), f"again: {what}", arrival)

    # What the core asks for

    def _perform(self, action: VersionAction) -> Sequence[VersionEvent]:
        match action:
            case Stage() | Commit():
                self._order(action)
            case Replace():
                engine = self._engines[action.engine_id]
                if engine.alive and engine.incarnation == action.incarnation:
                    must(action.version in self._stored, "an engine is replaced from a retired version", action)
                    self._end(engine, 0.0)
            case Retire():
                self._retire(action.version)
        return ()

    def _order(self, order: Stage | Commit) -> None:
        """Pass an order on; no answer within its deadline counts as a failure, an answer may still come."""
        must(order.version in self._stored, "an order is for a version that is not stored", order)
        if isinstance(order, Commit):
            must((order.incarnation, order.version) in self._staged, "commit of what was not staged", order)
        engine = self._engines[order.engine_id]
        if engine.incarnation == order.incarnation:
            engine.order(order)
        deadline_s = STAGE_DEADLINE_S if isinstance(order, Stage) else COMMIT_DEADLINE_S
        failed = StageFailed if isinstance(order, Stage) else CommitFailed
        failure = failed(order.engine_id, order.version, order.order, "no answer in time")

        def give_up() -> None:
            if order.order not in self._answered:
                self.driver.feed(failure)

        self.driver.call(deadline_s, f"deadline of order {order.order}", give_up)

    def _answer(self, engine: LoadingEngine, answer: Answer) -> None:
        self._answered.add(answer.order)
        if isinstance(answer, Staged):
            self._staged.add((engine.incarnation, answer.version))
        self.driver.feed(answer)

    def _retire(self, version: int) -> None:
        must(version in self._stored, "retired twice", version)
        must(version not in self._published[-KEEP:], "retired one of the last", version)
        must(all(pinned != version for pinned, _ in self._pins), "retired a pinned version", version)
        for engine in self._engines.values():
            must(not engine.alive or version not in engine.shards, "retired what an engine runs", engine.incarnation)
        self._stored.discard(version)

    # What must hold

    def _check(self) -> None:
        core = self.versions
        must(not core.violations(), "the core complains", core.violations())
        for engine_id, engine in self._engines.items():
            held = (engine.incarnation, engine.shards)
            if engine.serving:
                must(len(set(engine.shards)) == 1, "an engine serves a mixture", held)
                must(engine.shards[0] in self._published, "an engine serves an unpublished version", held)
            known = engine.alive and self._known.get(engine_id) == engine.incarnation
            if known and core.may_serve(engine_id):
                must(engine.serving, "the core lets a paused engine serve", held)
                must(core.engine_version(engine_id) == engine.shards[0], "the core is wrong about a version", held)

    def _check_quiet(self) -> None:
        core, last = self.versions, self._published[-KEEP:]
        must(core.newest() == last[-1], "the newest is", core.newest())
        for engine_id, engine in self._engines.items():
            must(engine.serving and engine.shards[0] == last[-1], "an engine lags", (engine.incarnation, engine.shards))
            must(core.may_serve(engine_id), "the core lets nobody use a sound engine", engine_id)
        must(core.kept() == tuple(last), "the core keeps", core.kept())
        must(self._stored == set(last), "the store keeps", sorted(self._stored))
