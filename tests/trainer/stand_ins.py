"""Scripted stand-ins for engines, their supervisor and environments, in the trainer's tests. Not a test module.

An engine here samples what a script tells it to, and counts it as a real token page would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.cli.trail import footprints
from rose.config import Job
from rose.env.contract import StepResult
from rose.errors import EngineError
from rose.records import Finish, VersionSpan
from rose.runs import Run
from rose.trainer.books import Books
from rose.trainer.sampler import SamplingSettings, TurnSampler
from rose_executor.keep_prefix import Keep
from rose_executor.token_page import RequestCount
from rose_executor.token_route import EngineLost, PartialOutput, RouteOutput
from rose_scheduler.client import Lease, Turn

END = 2
"""The end-of-turn id of the shipped tokenizer."""


@dataclass(frozen=True)
class Answer:
    """A whole answer under one version."""

    ids: tuple[int, ...]
    version: int = 0
    finish: Finish = Finish.STOP


@dataclass(frozen=True)
class Lost:
    """The engine dies after `ids` arrived and `generated` were made; `version` None: they are of two.

    It is handed out, and loses everything, until somebody waits for the news of its death.
    """

    ids: tuple[int, ...]
    generated: int
    version: int | None = 0


@dataclass(frozen=True)
class Refused:
    """Status 400."""


@dataclass(frozen=True)
class Silent:
    """Never answers; `generated` tokens are made meanwhile."""

    generated: int = 0


Reply = Answer | Lost | Refused | Silent


@dataclass(frozen=True)
class Asked:
    """A request as the engine got it."""

    incarnation: str
    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    keep: Keep


Script = Callable[[Asked], Reply]


@dataclass
class ScriptedEngine:
    """One incarnation: a `LiveEngine` as far as the trainer looks, and its own route."""

    supervisor: ScriptedSupervisor
    incarnation: str
    engine_id: str = "engine-0"
    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    dying: bool = False
    base_url: str = "http://engine-0"

    @property
    def route(self) -> ScriptedEngine:
        return self

    @property
    def control(self) -> ScriptedControl:
        return self.supervisor.control

    def total_tokens(self) -> int:
        return sum(self.counts.values())

    def request_tokens(self, request_id: str) -> int:
        return self.counts.get(request_id, 0)

    @property
    def lost(self) -> bool:
        return self is not self.supervisor.engines[-1]

    async def final_request(self, request_id: str) -> RequestCount:
        assert request_id in self.counts, f"nobody ever learns a final count of {request_id}"
        return RequestCount(self.counts[request_id], *self.versions.get(request_id, (0, 0)), True)

    async def news_of_death(self) -> None:
        if self.dying:
            self.supervisor.die(self)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        top_logprobs: int = 0,
        keep: Keep = Keep(),  # noqa: B008
        **_: Any,
    ) -> RouteOutput:
        asked = Asked(self.incarnation, request_id, tuple(token_ids), max_tokens, keep)
        self.supervisor.asked.append(asked)
        reply = Lost((), 0) if self.dying else self.supervisor.script(asked)
        await asyncio.sleep(0)
        match reply:
            case Answer(ids, version, finish):
                self.counts[request_id] = len(ids)
                top = tuple(dict.fromkeys(range(20), -0.5) for _ in ids) if top_logprobs else ()
                spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
                return RouteOutput(ids, (-0.5,) * len(ids), spans, finish, top)
            case Lost(ids, generated, at):
                self.counts[request_id] = generated
                self.dying = True
                self.versions[request_id] = (0, 1) if at is None else (at, at)
                raise EngineLost("engine-0 was lost", PartialOutput(request_id, ids, (-0.5,) * len(ids)))
            case Refused():
                raise EngineError(f"engine-0 refused {request_id}")
            case Silent(generated):
                self.counts[request_id] = generated
                await asyncio.Event().wait()
        raise AssertionError(reply)


Way = Sequence[tuple[str, bool]]


class ScriptedControl:
    """A control socket whose answers are queued; an empty queue succeeds."""

    def __init__(self) -> None:
        self.stage_failures: list[Exception] = []
        self.commit_failures: list[Exception] = []
        self.staged: list[tuple[int, Path, Way]] = []
        self.committed: list[int] = []

    async def stage(self, version: int, objects: Path, way: Way) -> None:
        self.staged.append((version, objects, way))
        if self.stage_failures:
            raise self.stage_failures.pop(0)

    async def commit(self, version: int) -> Any:
        self.committed.append(version)
        if self.commit_failures:
            raise self.commit_failures.pop(0)

        @dataclass
        class Committed:
            pause_ms: float = 1.5

        return Committed()


class ScriptedSupervisor:
    """Hands out the live incarnation; one that is known to be dead has a successor at once."""

    engine_id = "engine-0"

    def __init__(self, script: Script, joins: Callable[[ScriptedEngine], None] = lambda engine: None) -> None:
        self.script = script
        self.control = ScriptedControl()
        self.asked: list[Asked] = []
        self.engines: list[ScriptedEngine] = []
        self.replaced: list[tuple[str, str]] = []
        self._joins = joins
        self._born()

    async def ready(self) -> ScriptedEngine:
        await asyncio.sleep(0)
        return self.engines[-1]

    async def replace(self, incarnation: str, why: str) -> None:
        self.replaced.append((incarnation, why))

    def die(self, engine: ScriptedEngine) -> None:
        if engine is self.engines[-1]:
            self._born()

    def _born(self) -> None:
        engine = ScriptedEngine(self, f"{len(self.engines):016x}")
        self.engines.append(engine)
        self._joins(engine)


class ScriptedScheduler:
    """Grants every lease at once, on the live incarnation of a scripted supervisor; and finds the engine behind it."""

    def __init__(self, supervisor: ScriptedSupervisor) -> None:
        self._supervisor = supervisor
        self.leased: list[Turn] = []
        self.ended: list[Lease] = []
        self.over_ids: list[str] = []

    async def over(self, trajectory_id: str) -> None:
        self.over_ids.append(trajectory_id)

    @asynccontextmanager
    async def lease(self, turn: Turn, *, wait_s: float, hold_s: float) -> AsyncIterator[Lease]:
        self.leased.append(turn)
        engine = await self._supervisor.ready()
        lease = Lease("l", engine.engine_id, engine.incarnation, engine.base_url, turn.min_version, False, 0.0, "token")
        try:
            yield lease
        finally:
            self.ended.append(lease)

    async def behind(self, lease: Lease) -> ScriptedEngine:
        return next(engine for engine in self._supervisor.engines if engine.incarnation == lease.incarnation)


def a_sampler(supervisor: ScriptedSupervisor, books: Books, settings: SamplingSettings) -> TurnSampler:
    """Samples on the engines of a scripted supervisor, all of which are leased at once."""
    scheduler = ScriptedScheduler(supervisor)
    return TurnSampler(scheduler, scheduler, books, settings)  # type: ignore[arg-type]


def in_turn(*replies: Reply) -> Script:
    """A script that gives these replies, one a request."""
    left = list(replies)
    return lambda asked: left.pop(0)


@dataclass
class World:
    """What an environment of these tests does; `step` is given the action and its index."""

    reset: Callable[[int, str], Any] = lambda seed, episode_id: "begin"
    step: Callable[[str, int], Any] = lambda action, index: StepResult("next", 0.0, index >= 2, False)
    system_prompt: str = "do"
    closed: int = 0

    def make(self) -> Environment:
        return Environment(self)


class Environment:
    """One episode of a `World`."""

    def __init__(self, task: World) -> None:
        self._task = task
        self._steps = 0
        self.system_prompt = task.system_prompt

    def reset(self, seed: int, episode_id: str) -> Any:
        return self._task.reset(seed, episode_id)

    def step(self, action: str) -> Any:
        self._steps += 1
        return self._task.step(action, self._steps - 1)

    def close(self) -> None:
        self._task.closed += 1


class Logged:
    """What the log in a run's output folder says of a trajectory, as `rose trace` finds it."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def of(self, trajectory_id: str) -> list[dict[str, Any]]:
        return [step.values for step in footprints(trajectory_id, self._output)]

    def events(self, trajectory_id: str) -> list[str]:
        return [values["event"] for values in self.of(trajectory_id)]


def a_run(folder: Path) -> Run:
    """A run whose folders are there, without a lock."""
    runtime, output = folder / "rt", folder / "out"
    for each in (runtime, output):
        each.mkdir()
    return Run("demo-20260101-000000-0000", runtime, output, -1)


def a_job(model: Path, out: Path, **sections: dict[str, Any]) -> Job:
    """The smallest job on the shipped model, changed section by section."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "out": out},
        "model": {"path": model},
        "engine": {"kv_cache_gib": 0.0625, "max_num_seqs": 32},
        "environment": {"kind": "frozen_lake"},
        "rollout": {"groups": 2, "group_size": 2},
        "train": {"steps": 3, "threads": 1, "minibatches": 1},
        "evaluation": {"episodes": 8},
    }
    for name, values in sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    return Job.model_validate(tables)
