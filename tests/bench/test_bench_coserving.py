"""What the bench of the co-serving executor makes of what its phases have shown."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench.coserving import BENCH, chosen, left_out
from bench.coserving_costs import Costs, CostsFile, read_costs
from bench.coserving_figures import Shown, all_figures, reclaim_excess_ms, round_figures
from bench.coserving_phases import ALONE, NAIVE, OURS, PHASES
from bench.coserving_plots import draw
from bench.coserving_round import in_order, part_of_trace
from bench.registry import BenchFailed, benches
from rose.slo import Slo
from rose.workload.load_record import LoadRecord, Outcome
from rose_executor.step_log import Plan, SeenStep
from rose_executor.step_shape import StepShape

SLO = Slo(0.1, 0.02)


def request(index: int, sent_s: float, ttft_s: float = 0.05, tpot_s: float = 0.01, late_s: float = 0.0) -> LoadRecord:
    first_s = sent_s + ttft_s
    return LoadRecord(
        index, Outcome.COMPLETED, sent_s - late_s, first_s + 10 * tpot_s, 100, 11, 11, sent_s, first_s,
        first_s + 10 * tpot_s,
    )  # fmt: skip


def step(at_s: float, arrivals: int, used: int = 5, quota: int = 9) -> SeenStep:
    return SeenStep(StepShape(8, 8, 0), 0.01, Plan(at_s, arrivals, used, quota))


def shown(ttft_s: float, tokens: int, steps: tuple[SeenStep, ...] = ()) -> Shown:
    records = [request(index, float(index), ttft_s) for index in range(10)]
    return Shown(records, 500.0, 10.0, tokens, 7, steps, {"tokens_lost": 0.0})


ROUND = {ALONE.name: shown(0.05, 0), NAIVE.name: shown(0.2, 1000), OURS.name: shown(0.055, 900)}


def test_ratios_are_of_the_same_round_and_ours_stand_at_the_top() -> None:
    found = round_figures(ROUND, SLO)
    assert found["round_ttft_p99_ratio_naive"] == pytest.approx(4.0)
    assert found["round_ttft_p99_ratio"] == found["round_ttft_p99_ratio_ours"] == pytest.approx(1.1)
    assert found["round_tpot_p99_ratio"] == pytest.approx(1.0)
    assert found["round_guest_tok_s_fraction"] == pytest.approx(0.9)
    assert (found["round_slo_attainment"], found["round_slo_attainment_naive"]) == (1.0, 0.0)
    assert found["guest_tok_s_ours"] == 90.0


def test_a_step_beyond_its_quota_is_counted() -> None:
    steps = (step(500.0, 7), step(501.0, 7, used=10), step(502.0, 7, used=9))
    assert round_figures({OURS.name: shown(0.05, 10, steps)}, SLO)["over_quota_steps"] == 1


def test_reclaim_is_how_long_steps_were_planned_without_knowing() -> None:
    """Requests at seconds 0, 1, 2 ... of a replay that began at 500; before it 7 had come."""
    steps = (step(500.002, 7), step(500.004, 8), step(501.001, 9), step(501.5, 9), step(502.5, 9), step(502.7, 10))
    found = reclaim_excess_ms(shown(0.05, 10, steps))
    assert found[:4] == [pytest.approx(2.0), 0.0, pytest.approx(500.0), 0.0]
    assert len(found) == 10


def test_reclaim_asks_no_request_that_found_the_engine_busy_or_that_its_client_sent_late() -> None:
    records = [request(0, 0.0), request(1, 0.1), request(2, 0.19), request(3, 0.5), request(4, 5.0, late_s=0.2)]
    assert len(reclaim_excess_ms(Shown(records, 0.0, 9.0))) == 2  # the first, and that of half a second


def test_the_figures_that_have_a_target_are_of_all_rounds_together() -> None:
    calm = {name: replace(phase, records=phase.records[:1]) for name, phase in ROUND.items()}
    slow = {**calm, OURS.name: replace(shown(0.3, 90), records=shown(0.3, 90).records[:1])}
    found = all_figures([ROUND] * 20 + [slow], SLO)
    assert found["ttft_p99_ratio"] == found["ttft_p99_ratio_ours"] == pytest.approx(1.1)  # one of 201 is beyond the p99
    assert found["guest_tok_s_fraction"] == pytest.approx((20 * 900 + 90) / (21 * 1000))
    assert found["slo_attainment"] == pytest.approx(200 / 201)
    assert found["requests_together_ours"] == 201
    assert (found["reclaim_excess_ms"], found["reclaims"]) == (0.0, 201)
    assert found["ttft_p99_ratio_low"] == pytest.approx(1.1)
    assert round_figures(slow, SLO)["round_ttft_p99_ratio"] == pytest.approx(6.0)


def test_an_interval_spans_what_rounds_that_are_drawn_anew_show() -> None:
    rounds = [{ALONE.name: shown(0.05, 0), OURS.name: shown(0.05 * times, 9)} for times in (1.0, 1.1, 1.2, 1.3, 1.4)]
    found = all_figures(rounds, SLO)
    assert found["ttft_p99_ratio"] == pytest.approx(1.4)
    assert found["ttft_p99_ratio_low"] == pytest.approx(1.2, abs=0.11)
    assert found["ttft_p99_ratio_high"] == pytest.approx(1.4)
    assert found["tpot_p99_ratio_low"] == found["tpot_p99_ratio_high"] == pytest.approx(1.0)
    assert found == all_figures(rounds, SLO)


def test_each_round_has_each_phase_once_and_its_own_part_of_the_trace() -> None:
    assert sorted(phase.name for phase in in_order(PHASES, 3)) == sorted(phase.name for phase in PHASES)
    assert in_order(PHASES, 0) != in_order(PHASES, 1)
    assert in_order(PHASES, 1) == in_order(PHASES, 1)
    starts = {part_of_trace(index).scaling.start_s for index in range(6)}
    assert len(starts) == 6


def test_phases_can_be_left_out_and_what_that_costs_is_said() -> None:
    assert [phase.name for phase in chosen("alone,ours")] == ["alone", "ours"]
    assert chosen("") == PHASES
    with pytest.raises(BenchFailed, match="no phase nonsense"):
        chosen("ours,nonsense")
    left = left_out(Namespace(only="ours"))
    assert {"ttft_p99_ratio", "tpot_p99_ratio", "guest_tok_s_fraction"} <= left.keys() <= set(BENCH.headline)
    assert benches()["coserving"] is BENCH


def test_costs_are_told_now_and_then_and_read_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.coserving_costs._WRITE_EVERY_S", 0.0)
    monkeypatch.setenv("COSTS", str(tmp_path / "steps.json"))
    CostsFile("COSTS").tell(ours_s=0.5, step_s=20.0)
    CostsFile("NOT_SET").tell(probe_s=1.0)
    before = read_costs(tmp_path / "steps.json", tmp_path / "probe.json")
    assert before == Costs(0.5, 20.0, 0.0)
    (tmp_path / "probe.json").write_text(json.dumps({"probe_s": 0.25}))
    after = read_costs(tmp_path / "steps.json", tmp_path / "probe.json")
    assert after.since(before) == Costs(0.0, 0.0, 0.25)


def test_a_picture_of_each_figure_lies_beside_the_file(tmp_path: Path) -> None:
    files = draw([{**round_figures(ROUND, SLO), **all_figures([ROUND], SLO)}], tmp_path / "result.json")
    assert len(files) == 4
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.name.startswith("result-") for file in files)
