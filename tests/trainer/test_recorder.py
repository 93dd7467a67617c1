"""The recorder: what happened is in the report, in order, whatever its listeners and numbers are like."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from stand_ins import a_job, a_run

from rose.ledger import Account
from rose.metrics import Metrics
from rose.records import Finish, Outcome, Purpose, Trajectory, Turn, VersionSpan
from rose.report.model import Evaluation, RunReport, Step
from rose.status import StatusBoard
from rose.trainer.books import Books
from rose.trainer.recorder import Recorder
from rose.waits import WaitBoard


class Bench:
    """A recorder on a real board, real metrics and real books."""

    def __init__(self, folder: Path, model: Path, books: Books, waits: WaitBoard) -> None:
        self.books, self.waits = books, waits
        run = a_run(folder)
        self.board = StatusBoard(run, waits)
        self.metrics = Metrics()
        self.changes = 0
        self.recorder = Recorder(a_job(model, folder), run, books, waits, self.board, self.metrics, self._changed)

    def _changed(self, recorder: Recorder) -> None:
        assert recorder is self.recorder
        self.changes += 1

    def facts(self) -> dict[str, Any]:
        return dict(self.board.page().facts)

    def metric(self, line: str) -> bool:
        return line in generate_latest(self.metrics.registry).decode()


@pytest.fixture
def bench(tmp_path: Path, shipped_model: Path, books: Books, waits: WaitBoard) -> Bench:
    return Bench(tmp_path, shipped_model, books, waits)


def a_step(step: int, **changes: Any) -> Step:
    numbers = dict.fromkeys(
        (
            *("reward_mean", "turns_mean", "rollout_s", "train_s", "publish_s", "apply_s", "pause_ms"),
            *("logprob_mismatch_max", "loss", "entropy", "grad_norm", "clip_fraction", "learning_rate"),
            "changed_fraction",
        ),
        0.5,
    )
    counts = dict.fromkeys(
        (
            *("groups_used", "groups_zero_variance", "output_tokens", "context_tokens", "trained_tokens"),
            "update_bytes",
            "model_bytes",
        ),
        1,
    )
    fixed = {"step": step, "version": step, "success": 0.25, "malformed_fraction": 0.0, "outcomes": {"completed": 4}}
    return Step.model_validate({**numbers, **counts, **fixed, **changes})


def an_evaluation(success: float) -> Evaluation:
    return Evaluation(
        step=0, version=0, episodes=8, success=success, reward_mean=0, malformed_fraction=0, turns_mean=1, wall_s=1
    )


def a_trajectory(outcome: Outcome, failure: str = "") -> Trajectory:
    turn = Turn((1,), (2,), (-0.1,), (VersionSpan(0, 0, 1),), Finish.STOP)
    return Trajectory("t", "g", 0, Purpose.TRAIN, (turn,), 0.0, False, outcome, failure=failure)


def test_everything_that_was_recorded_is_in_the_report_and_survives_the_file(bench: Bench) -> None:
    recorder = bench.recorder
    with recorder.during("rollout"):
        assert recorder.phase == "rollout"
    recorder.published(1)
    recorder.step(a_step(1))
    recorder.evaluation(an_evaluation(0.5))
    recorder.restart("engine-0", "ended with code -9")
    recorder.alarm(1, "acts malformed")
    report = recorder.report("stopped", "training: acts malformed")
    assert RunReport.from_json(report.to_json()) == report
    assert (report.outcome, report.versions_published, report.success_before) == ("stopped", 1, 0.5)
    assert [restart.cause for restart in report.engine_restarts] == ["ended with code -9"]
    assert [alarm.what for alarm in report.alarms] == ["acts malformed"]
    assert [phase.name for phase in report.phases] == ["rollout"]


def test_a_phase_is_recorded_also_when_its_body_fails(bench: Bench) -> None:
    with pytest.raises(KeyError), bench.recorder.during("train"):
        raise KeyError
    (phase,) = bench.recorder.report("stopped").phases
    assert phase.end_s >= phase.start_s >= 0


def test_a_background_phase_is_not_what_the_run_is_doing(bench: Bench) -> None:
    with bench.recorder.during("rollout"), bench.recorder.during("parity", background=True):
        assert bench.recorder.phase == "rollout"


def test_a_parity_difference_goes_to_the_step_that_published_the_version(bench: Bench) -> None:
    for step in (1, 2):
        bench.recorder.step(a_step(step))
    bench.recorder.parity(1, 3e-6)
    bench.recorder.parity(0, 1e-6)  # of the version before any step: nowhere to stand
    assert [step.parity_max for step in bench.recorder.steps] == [3e-6, None]


def test_the_ledger_is_that_of_the_pages_as_of_now(bench: Bench) -> None:
    class Page:
        engine_id, incarnation, count = "engine-0", "a", 3

        def total_tokens(self) -> int:
            return self.count

        def request_tokens(self, request_id: str) -> int:
            return self.count

    page = Page()
    bench.books.watch(page)
    assert (bench.recorder.ledger().generated, bench.recorder.ledger().gap) == (3, 3)
    page.count = 5
    bench.recorder.notify()
    assert bench.facts()["tokens generated"] == 5
    assert bench.metric("rose_ledger_gap_tokens 5.0")


def test_status_and_metrics_follow_every_change(bench: Bench) -> None:
    bench.recorder.published(4)
    bench.recorder.step(a_step(4))
    bench.recorder.restart("engine-0", "killed")
    bench.recorder.part("engine-0", "starting", "version 4")
    assert bench.facts()["step"] == 1
    assert bench.facts()["version"] == 4
    assert ("engine-0", "starting", "version 4") in bench.recorder.parts()
    assert bench.metric('rose_engine_restarts_total{engine_id="engine-0"} 1.0')
    assert bench.changes >= 3


def test_environment_failures_are_counted_by_cause_and_cut_to_a_line(bench: Bench) -> None:
    cause = "environment: environment s1g0-1: its step raised ValueError: "
    bench.recorder.trajectories(
        [
            a_trajectory(Outcome.ENVIRONMENT_FAILED, cause + "boom"),
            a_trajectory(Outcome.ENVIRONMENT_FAILED, cause.replace("g0-1", "g1-0") + "boom"),
            a_trajectory(Outcome.ENVIRONMENT_FAILED, cause + "x" * 10_000),
            a_trajectory(Outcome.COMPLETED),
        ]
    )
    failures = bench.recorder.report("finished").environment_failures
    assert sorted(failures.values()) == [1, 2]
    assert max(map(len, failures)) <= 120


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_neither_fail_the_run_nor_the_report(bench: Bench, value: float) -> None:
    bench.recorder.step(a_step(1, loss=value, grad_norm=value, reward_mean=value))
    report = bench.recorder.report("finished")
    assert report.steps[0].loss is None
    RunReport.from_json(report.to_json())


def test_a_listener_that_fails_is_dropped_and_the_run_goes_on(
    tmp_path: Path, shipped_model: Path, books: Books, waits: WaitBoard
) -> None:
    calls: list[int] = []

    def fails(recorder: Recorder) -> None:
        calls.append(len(recorder.steps))
        raise BrokenPipeError(32, "nobody reads")

    recorder = _recorder(tmp_path, shipped_model, books, waits, fails)
    recorder.step(a_step(1))
    recorder.step(a_step(2))
    assert calls == [1]
    assert len(recorder.report("finished").steps) == 2


def _recorder(
    folder: Path, model: Path, books: Books, waits: WaitBoard, changed: Callable[[Recorder], None]
) -> Recorder:
    run = a_run(folder)
    return Recorder(a_job(model, folder), run, books, waits, StatusBoard(run, waits), Metrics(), changed)


def test_open_requests_at_the_report_are_a_gap_and_not_an_error(bench: Bench) -> None:
    bench.books.open_trajectory("t")
    assert bench.recorder.report("stopped").ledger.accounts[Account.IN_FLIGHT.value] == 0


class Counted:
    """One incarnation, which has counted so many tokens."""

    incarnation = "a"

    def __init__(self, engine_id: str, tokens: int) -> None:
        self.engine_id, self._tokens = engine_id, tokens

    def total_tokens(self) -> int:
        return self._tokens

    def request_tokens(self, request_id: str) -> int:
        return 0


def test_the_report_says_what_came_from_which_engine_and_on_whose_word(bench: Bench) -> None:
    own, guest = Counted("engine-0", 5), Counted("guest", 0)
    bench.books.watch(own)
    bench.books.watch(guest, lent=True)
    bench.books.open_trajectory("t")
    bench.books.start_request("r0", "t", own)
    bench.books.end_request("r0", 5)
    bench.books.start_request("r1", "t", guest)
    bench.books.end_unsure("r1", 2, 3)
    bench.books.settle("t", Account.TRAINED)
    assert bench.books.trust(guest, "nobody answers")
    bench.books.close()
    report = bench.recorder.report("finished")
    rows = [(row.engine_id, row.kind, row.tokens_received, row.requests, row.lost_requests) for row in report.engines]
    assert rows == [("engine-0", "dedicated", 5, 1, 0), ("guest", "lent", 2, 1, 1)]
    assert report.guest_share == 2 / 7
    assert (report.ledger.gap, report.ledger.accounts["unreceived"]) == (0, 1)
    (line,) = report.ledger.violations
    assert "guest" in line
    assert "nobody answers" in line
