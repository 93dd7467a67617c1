"""Weight-version state: which engine runs which version, and what to do about it.

A pure core. Versions are immutable and whole; an engine changes version between steps, all shards or none.
Every engine is brought to the newest version by two orders: *stage* (fetch and verify beside the live
weights, while generating) and *commit* (swap between steps). A failed stage leaves the old version whole, and so
does a commit that was undone: both count as a failure to stage. A failed commit may have mixed weights: that engine
gets no traffic and must be restarted from a snapshot.

Invariants
- `may_serve` is true only for an engine whose weights are exactly `engine_version`, a published version.
- Commit is ordered only after the engine said that it staged that very order.
- An engine has at most one unanswered order. Each order has a number of its own, every answer repeats it,
  and only the answer to the newest order counts: late, repeated and reordered answers change nothing. So does
  news about an incarnation that has ended.
- Version numbers only rise. Versions may be skipped: a new order is always for the newest.
- A version is retired once, and only if it is not among the last `keep`, not pinned, and no engine runs it,
  is being brought to it, or is to be restarted from it.

State table of an engine ("→ stage" orders the newest, or goes to serving if it runs the newest)

    state        Published   Staged      StageFailed           Committed   CommitUndone          CommitFailed
    serving      → stage     ignored     ignored               ignored     ignored               ignored
    staging      waits       → commit    → stage, or lagging   ignored     ignored               ignored
    committing   waits       ignored     ignored               → stage     → stage, or lagging   → poisoned, Replace
    lagging      → stage     ignored     ignored               ignored     ignored               ignored
    poisoned     stays       ignored     ignored               ignored     ignored               ignored

A version staged while a newer one appeared is committed all the same: otherwise a fast publisher would keep
an engine staging for ever. An engine whose stage failed too often is *lagging*: it serves its old version,
which is whole, until the next one is published. A new incarnation (EngineJoined) starts at "→ stage", or
poisoned if it loaded a version that is not kept; EngineLost forgets the engine.

What the caller owes: every order is answered exactly once, at the latest by StageFailed or CommitFailed when
its deadline is over. The lives of one engine are reported in order, perhaps more than once. Whoever starts an
engine pins the version it loads from, from before the old incarnation is reported lost until the new one
has joined. A poisoned engine is ended before it is started again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from rose.version_events import (
    Commit,
    CommitFailed,
    Committed,
    CommitUndone,
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
from rose.violations import Violations

ENDED_INCARNATIONS_KEPT = 64


class EnginePhase(StrEnum):
    """See the state table above."""

    SERVING = "serving"
    STAGING = "staging"
    COMMITTING = "committing"
    LAGGING = "lagging"
    POISONED = "poisoned"


@dataclass(slots=True)
class _Engine:
    """`target` is the version it is being brought to or, poisoned, is to be restarted from."""

    incarnation: str
    running: int
    phase: EnginePhase = EnginePhase.SERVING
    target: int = -1
    order: int = -1
    stage_failures: int = 0
    trouble: str = ""


@dataclass(slots=True)
class _Version:
    fingerprint: str
    pinned_by: set[str] = field(default_factory=set)


class VersionState:
    """Brings every engine to the newest version and retires what nobody needs.

    `keep` versions are always kept; `stage_attempts` is how often one version is tried on one engine
    before the engine is left lagging. Raises ValueError if either is below 1.
    """

    def __init__(self, keep: int = 2, stage_attempts: int = 3) -> None:
        if keep < 1 or stage_attempts < 1:
            raise ValueError(f"keep={keep} and stage_attempts={stage_attempts} must be at least 1")
        self._keep = keep
        self._stage_attempts = stage_attempts
        self._versions: dict[int, _Version] = {}
        self._newest: int | None = None
        self._engines: dict[str, _Engine] = {}
        self._ended: dict[str, deque[str]] = {}
        self._orders = 0
        self._violations = Violations()

    def step(self, event: VersionEvent, now: float) -> tuple[VersionAction, ...]:
        """Take one event; returns what to do about it, in order. Time plays no part: deadlines are the caller's."""
        actions = self._react(event)
        return (*actions, *self._retire())

    def newest(self) -> int | None:
        """Highest published version, None before the first."""
        return self._newest

    def kept(self) -> tuple[int, ...]:
        """Versions that are not retired, oldest first."""
        return tuple(self._versions)

    def engine_version(self, engine_id: str) -> int | None:
        """Version in force on an engine; None if it is unknown, lost or poisoned. While it commits: the old one."""
        engine = self._engines.get(engine_id)
        return None if engine is None or engine.phase is EnginePhase.POISONED else engine.running

    def may_serve(self, engine_id: str) -> bool:
        """Whether new requests may go to an engine. Not while it commits: it is paused, and may fail."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.phase not in (EnginePhase.COMMITTING, EnginePhase.POISONED)

    def phase(self, engine_id: str) -> EnginePhase | None:
        """Where an engine is in the state table, None if it is unknown or lost."""
        engine = self._engines.get(engine_id)
        return None if engine is None else engine.phase

    def trouble(self) -> dict[str, str]:
        """Why each lagging or poisoned engine is so, by engine id."""
        return {engine_id: engine.trouble for engine_id, engine in self._engines.items() if engine.trouble}

    def violations(self) -> tuple[str, ...]:
        """Refused events, oldest first. Past the first 100 they are only counted, by one last line."""
        return self._violations.lines()

    def _react(self, event: VersionEvent) -> tuple[VersionAction, ...]:
        match event:
            case Published():
                return self._published(event)
            case EngineJoined():
                return self._joined(event)
            case EngineLost():
                self._lost(event)
            case Staged() | StageFailed():
                return self._stage_answered(event)
            case Committed() | CommitUndone() | CommitFailed():
                return self._commit_answered(event)
            case Pinned():
                self._pinned(event)
            case Unpinned():
                if event.version in self._versions:
                    self._versions[event.version].pinned_by.discard(event.by)
        return ()

    def _published(self, event: Published) -> tuple[VersionAction, ...]:
        if self._newest is not None and event.version <= self._newest:
            same = self._versions.get(event.version)
            differs = same is not None and same.fingerprint != event.fingerprint
            detail = f"with another fingerprint, {event.fingerprint}" if differs else f"after {self._newest}"
            self._violations.add(f"version {event.version} published {detail}")
            return ()
        self._versions[event.version] = _Version(event.fingerprint)
        self._newest = event.version
        ready = (EnginePhase.SERVING, EnginePhase.LAGGING)
        return tuple(
            action
            for engine_id, engine in self._engines.items()
            if engine.phase in ready
            for action in self._advance(engine_id, engine)
        )

    def _joined(self, event: EngineJoined) -> tuple[VersionAction, ...]:
        ended = self._ended.setdefault(event.engine_id, deque(maxlen=ENDED_INCARNATIONS_KEPT))
        known = self._engines.get(event.engine_id)
        if event.incarnation in ended or (known is not None and known.incarnation == event.incarnation):
            return ()
        if known is not None:
            ended.append(known.incarnation)
            del self._engines[event.engine_id]
        if self._newest is None:
            self._violations.add(
                f"engine {event.engine_id} joined with version {event.version} before any was published"
            )
            return ()
        engine = _Engine(event.incarnation, event.version)
        self._engines[event.engine_id] = engine
        if event.version not in self._versions:
            return self._poison(event.engine_id, engine, f"it loaded version {event.version}, which is not kept")
        return self._advance(event.engine_id, engine)

    def _lost(self, event: EngineLost) -> None:
        ended = self._ended.setdefault(event.engine_id, deque(maxlen=ENDED_INCARNATIONS_KEPT))
        if event.incarnation not in ended:
            ended.append(event.incarnation)
        known = self._engines.get(event.engine_id)
        if known is not None and known.incarnation == event.incarnation:
            del self._engines[event.engine_id]

    def _stage_answered(self, event: Staged | StageFailed) -> tuple[VersionAction, ...]:
        engine = self._engines.get(event.engine_id)
        if engine is None or engine.phase is not EnginePhase.STAGING or engine.order != event.order:
            return ()
        if isinstance(event, Staged):
            engine.phase = EnginePhase.COMMITTING
            engine.order = self._new_order()
            return (Commit(event.engine_id, engine.incarnation, engine.target, engine.order),)
        return self._refused(event.engine_id, engine, event.why)

    def _commit_answered(self, event: Committed | CommitUndone | CommitFailed) -> tuple[VersionAction, ...]:
        engine = self._engines.get(event.engine_id)
        if engine is None or engine.phase is not EnginePhase.COMMITTING or engine.order != event.order:
            return ()
        if isinstance(event, CommitFailed):
            why = f"the commit of version {engine.target} failed: {event.why}"
            return self._poison(event.engine_id, engine, why)
        if isinstance(event, CommitUndone):
            return self._refused(event.engine_id, engine, event.why)
        engine.running = engine.target
        return self._advance(event.engine_id, engine)

    def _refused(self, engine_id: str, engine: _Engine, why: str) -> tuple[VersionAction, ...]:
        """The engine keeps its old version; whether it is to try again."""
        engine.stage_failures += 1
        if engine.target == self._newest and engine.stage_failures >= self._stage_attempts:
            engine.phase = EnginePhase.LAGGING
            engine.trouble = f"version {engine.target} was refused {engine.stage_failures} times: {why}"
            return ()
        return self._advance(engine_id, engine)

    def _pinned(self, event: Pinned) -> None:
        version = self._versions.get(event.version)
        if version is None:
            self._violations.add(f"version {event.version} pinned by {event.by}, but it is not kept")
        else:
            version.pinned_by.add(event.by)

    def _advance(self, engine_id: str, engine: _Engine) -> tuple[VersionAction, ...]:
        """Order the newest version, or let the engine serve if it runs it."""
        assert self._newest is not None
        engine.trouble = ""
        if engine.running == self._newest:
            engine.phase = EnginePhase.SERVING
            return ()
        if engine.target != self._newest:
            engine.stage_failures = 0
        engine.phase = EnginePhase.STAGING
        engine.target = self._newest
        engine.order = self._new_order()
        return (Stage(engine_id, engine.incarnation, engine.target, engine.order),)

    def _poison(self, engine_id: str, engine: _Engine, why: str) -> tuple[VersionAction, ...]:
        assert self._newest is not None
        engine.phase = EnginePhase.POISONED
        engine.target = self._newest
        engine.trouble = why
        return (Replace(engine_id, engine.incarnation, self._newest, why),)

    def _retire(self) -> tuple[Retire, ...]:
        """Forget and retire every version that nobody needs; the newest `keep` are always needed."""
        if len(self._versions) <= self._keep:
            return ()
        used = {v for engine in self._engines.values() for v in (engine.running, engine.target)}
        older = list(self._versions)[: -self._keep]
        unused = [v for v in older if v not in used and not self._versions[v].pinned_by]
        for version in unused:
            del self._versions[version]
        return tuple(Retire(version) for version in unused)

    def _new_order(self) -> int:
        self._orders += 1
        return self._orders
