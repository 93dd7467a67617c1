"""What the bench of the co-serving demo reads from its reports, and that its two sides differ in the guest alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.coserve_demo import BENCH, figures_of, goodput
from bench.coserve_without import without_guest
from bench.registry import BenchFailed, benches
from rose.demo.plan import planned_job, shipped_plan
from rose.report.coserving import EngineTokens, LatencyFigures, Serving, Sharing
from rose.report.model import LedgerSummary, RunReport, Step


def step(number: int, tokens: int, rollout_s: float) -> Step:
    return Step(
        step=number, version=number, success=0.5, reward_mean=0.5, turns_mean=3.0, malformed_fraction=0.0,
        groups_used=1, groups_zero_variance=0, outcomes={}, output_tokens=tokens, context_tokens=0,
        trained_tokens=tokens, rollout_s=rollout_s, train_s=0.5, publish_s=0.25, apply_s=0.25, pause_ms=1.0,
        logprob_mismatch_max=None, loss=None, entropy=None, grad_norm=None, clip_fraction=None, learning_rate=None,
        changed_fraction=None, update_bytes=0, model_bytes=0,
    )  # fmt: skip


def latencies(ttft_ms: float, kept: float) -> LatencyFigures:
    return LatencyFigures(
        requests=10, outcomes={"completed": 10}, tokens=100, duration_s=60.0,
        ttft_p50_ms=ttft_ms, ttft_p95_ms=ttft_ms, ttft_p99_ms=ttft_ms, tpot_p50_ms=5.0, tpot_p95_ms=5.0,
        tpot_p99_ms=5.0, slo_kept=kept, ttft_kept=kept, tpot_kept=kept, client_lag_p99_ms=1.0,
    )  # fmt: skip


def report(*steps: Step) -> RunReport:
    serving = Serving(
        trace="t", attribution="a", rate_rps=3.0, replays=2, slo_ttft_ms=80.0, slo_tpot_ms=8.0, slo_ttft_factor=1.6,
        slo_tpot_factor=1.27, alone=latencies(50.0, 1.0), shared=latencies(55.0, 0.995),
    )  # fmt: skip
    engines = (
        EngineTokens(engine_id="engine-0", kind="dedicated", tokens_received=75, requests=9),
        EngineTokens(engine_id="executor", kind="lent", tokens_received=25, requests=3, lost_requests=1),
    )
    return RunReport(
        run_id="r", name="r", started_at="", wall_s=9.0, outcome="finished", steps=steps, versions_published=len(steps),
        ledger=LedgerSummary(accounts={"trained": 100}, generated=100), serving=serving, sharing=Sharing(partition="p"),
        engines=engines,
    )  # fmt: skip


def test_the_figures_of_the_issue_come_from_the_report() -> None:
    found = figures_of(report(step(1, 100, 2.0)), 300.0)
    assert found["serving_ttft_p95_ratio"] == pytest.approx(1.1)
    assert found["serving_tpot_p95_ratio"] == pytest.approx(1.0)
    assert (found["slo_attainment"], found["guest_share"], found["ledger_gap"]) == (0.995, 0.25, 0)
    assert (found["wall_s"], found["lost_requests"]) == (300.0, 1)
    assert set(BENCH.headline) - set(found) == {"goodput_ratio"}
    assert {target.figure for target in BENCH.targets} == set(BENCH.headline)
    assert benches()["coserve_demo"] is BENCH


def test_a_report_without_serving_is_no_result() -> None:
    bare = report().model_copy(update={"serving": None})
    with pytest.raises(BenchFailed, match="nothing of serving"):
        figures_of(bare, 1.0)


def test_goodput_is_of_the_same_steps_and_of_all_that_a_step_takes() -> None:
    whole = report(step(1, 1000, 99.0), step(2, 30, 2.0), step(3, 60, 5.0), step(4, 1000, 1.0))
    assert goodput(whole, range(2, 4)) == pytest.approx(90 / 9.0)
    with pytest.raises(BenchFailed, match="no goodput of steps 7 to 8"):
        goodput(whole, range(7, 9))


def test_the_two_sides_differ_in_the_guest_and_in_their_length_alone(tmp_path: Path) -> None:
    plan = without_guest(tmp_path, 3)
    shipped = shipped_plan(tmp_path, plain=True)
    assert replace(plan, guest=shipped.guest, job=shipped.job) == shipped
    job, whole = planned_job(plan), planned_job(shipped)
    assert job.train.steps == 3
    same = {"train": whole.train, "evaluation": whole.evaluation}
    assert job.model_copy(update=same) == whole
