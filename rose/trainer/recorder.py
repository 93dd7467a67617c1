"""What has happened in a run so far: the one source of its status page, metrics, terminal view and report.

Invariants
- Everything is recorded when it happened, in order; the report at any moment holds all of it, also after a failure.
- Recording never decides and never fails the run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

from rose import machine
from rose.config import Job
from rose.ledger import Account
from rose.logs import logger
from rose.metrics import Metrics
from rose.records import Outcome, Trajectory
from rose.report.coserving import EngineTokens
from rose.report.model import Alarm, EngineRestart, Evaluation, LedgerSummary, Phase, RunReport, Sample, Step
from rose.runs import Run
from rose.status import StatusBoard
from rose.trainer.books import Books, Tally
from rose.waits import Wait, WaitBoard

log = logger("run")


class Recorder:
    """Collects a run; `changed` is called after every change, with the recorder itself, until it fails once."""

    def __init__(
        self,
        job: Job,
        run: Run,
        books: Books,
        waits: WaitBoard,
        board: StatusBoard,
        metrics: Metrics,
        changed: Callable[[Recorder], None],
    ) -> None:
        self.job = job
        self.run = run
        self.phase = "starting"
        self.version = 0
        self.versions_published = 0
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.alarms: list[Alarm] = []
        self.restarts: list[EngineRestart] = []
        self.failures: Counter[str] = Counter()
        self._books = books
        self._waits = waits
        self._board = board
        self._metrics = metrics
        self._changed: Callable[[Recorder], None] | None = changed
        self._samples: list[Sample] = []
        self._phases: list[Phase] = []
        self._started_at = datetime.now(UTC)
        self._started_s = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started_s

    @contextmanager
    def during(self, name: str, *, background: bool = False) -> Iterator[None]:
        """Record a phase; unless it runs in the background, it is what the run is doing now."""
        start_s = self.elapsed_s()
        if not background:
            self.phase = name
            self._board.part("trainer", name)
            self.notify()
        try:
            yield
        finally:
            self._phases.append(Phase(name=name, start_s=start_s, end_s=self.elapsed_s()))

    def part(self, name: str, state: str, detail: str = "") -> None:
        """Say what a part of the run is doing."""
        self._board.part(name, state, detail)
        self.notify()

    def fact(self, key: str, value: str) -> None:
        """Put an address or a path on the status page."""
        self._board.fact(key, value)

    def parts(self) -> Sequence[tuple[str, str, str]]:
        """(name, state, detail) of every part."""
        return [(part.name, part.state, part.detail) for part in self._board.page().parts]

    def waits(self) -> tuple[Wait, ...]:
        return self._waits.snapshot()

    def ledger(self) -> LedgerSummary:
        """The accounts as of now. A gap while requests run is tokens on their way."""
        self._books.read_pages()
        ledger = self._books.ledger
        accounts = {account.value: tokens for account, tokens in ledger.accounts().items()}
        violations = (*ledger.violations(), *self._books.trusted())
        return LedgerSummary(accounts=accounts, generated=ledger.generated(), violations=violations)

    def trajectories(self, finished: Sequence[Trajectory]) -> None:
        """Count what came back from a rollout."""
        for trajectory in finished:
            self._metrics.trajectories.labels(trajectory.purpose, trajectory.outcome).inc()
            self._metrics.turns.labels(trajectory.purpose).inc(len(trajectory.turns))
            if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
                cause = trajectory.failure.partition(": ")[2].partition(": ")[2] or trajectory.failure
                self.failures[cause[:120]] += 1
                self._metrics.environment_failures.labels(self.job.environment.kind).inc()
        self._board.part("environments", "ready", f"{self.failures.total()} episodes failed")

    def published(self, version: int) -> None:
        self.versions_published += 1
        self.version = version
        self._metrics.versions_published.inc()

    def applied(self, engine_id: str, version: int, apply_s: float, pause_ms: float | None) -> None:
        self._metrics.weight_version.labels(engine_id).set(version)
        self._metrics.apply_seconds.observe(apply_s)
        if pause_ms is not None:
            self._metrics.pause_seconds.observe(pause_ms / 1e3)

    def step(self, step: Step) -> None:
        self.steps.append(step)
        self._metrics.steps.inc()
        self._metrics.rollout_seconds.observe(step.rollout_s or 0.0)
        self._metrics.train_seconds.observe(step.train_s or 0.0)
        self._metrics.malformed_fraction.set(step.malformed_fraction)
        self._metrics.success_fraction.labels("train").set(step.success)
        log.info("step", **step.model_dump(mode="json", exclude={"outcomes"}))
        self.notify()

    def parity(self, version: int, difference: float) -> None:
        """A fresh engine has scored `version`; put it on the step that published it."""
        self._metrics.parity_difference.set(difference)
        self.steps = [
            step.model_copy(update={"parity_max": difference}) if step.version == version else step
            for step in self.steps
        ]
        self.notify()

    def evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        self._metrics.success_fraction.labels("evaluation").set(evaluation.success)
        log.info("evaluation", **evaluation.model_dump(mode="json"))
        self.notify()

    def alarm(self, version: int, what: str) -> None:
        self.alarms.append(Alarm(version=version, what=what))
        log.error("alarm", version=version, what=what)
        self.notify()

    def restart(self, engine_id: str, cause: str) -> None:
        self.restarts.append(EngineRestart(at_s=self.elapsed_s(), engine_id=engine_id, cause=cause))
        self._metrics.engine_restarts.labels(engine_id).inc()
        log.warning("engine restarts", engine_id=engine_id, cause=cause)
        self.notify()

    def samples(self, samples: Sequence[Sample]) -> None:
        self._samples.extend(samples)

    def notify(self) -> None:
        """Bring status, metrics and the watcher up to date."""
        ledger = self.ledger()
        for account in Account:
            self._metrics.tokens.labels(account).set(ledger.accounts[account])
        self._metrics.tokens_generated.set(ledger.generated)
        self._metrics.ledger_gap_tokens.set(ledger.gap)
        self._metrics.open_waits.set(len(self.waits()))
        for key, value in {
            "step": len(self.steps),
            "steps": self.job.train.steps,
            "version": self.version,
            "success": self.steps[-1].success if self.steps else None,
            "tokens generated": ledger.generated,
            "alarms": len(self.alarms),
        }.items():
            self._board.fact(key, value)
        self._tell()

    def _tell(self) -> None:
        if self._changed is None:
            return
        try:
            self._changed(self)
        except Exception as error:  # noqa: BLE001 - who watches a run must not be able to end it
            self._changed = None
            log.warning("the view failed and is not shown any more; the run goes on", why=repr(error))

    def report(self, outcome: Literal["finished", "stopped"], cause: str = "") -> RunReport:
        """Everything so far, as the report of a run that ends now."""
        here = machine.look()
        return RunReport(
            run_id=self.run.run_id,
            name=self.job.run.name,
            started_at=self._started_at.isoformat(timespec="milliseconds"),
            wall_s=self.elapsed_s(),
            outcome=outcome,
            cause=cause,
            machine={
                "cpu": here.cpu,
                "cores": here.cores_usable,
                "memory_bytes": here.memory_bytes,
                "system": here.system,
                "python": here.python,
                "gpus": [gpu.name for gpu in here.gpus],
            },
            packages=here.packages,
            job=self.job.model_dump(mode="json"),
            evaluations=tuple(self.evaluations),
            steps=tuple(self.steps),
            ledger=self.ledger(),
            versions_published=self.versions_published,
            malformed_limit=self.job.alarm.malformed_max,
            parity_tolerance=self.job.weights.parity_tolerance,
            alarms=tuple(self.alarms),
            engine_restarts=tuple(self.restarts),
            environment_failures=dict(self.failures),
            samples=tuple(self._samples),
            phases=tuple(sorted(self._phases, key=lambda phase: phase.start_s)),
            engines=tuple(_row(engine_id, tally) for engine_id, tally in self._books.tallies.items()),
        )


def _row(engine_id: str, tally: Tally) -> EngineTokens:
    return EngineTokens(
        engine_id=engine_id,
        kind="lent" if tally.lent else "dedicated",
        tokens_received=tally.received,
        requests=tally.requests,
        lost_requests=tally.lost,
    )
