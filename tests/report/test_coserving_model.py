"""The co-serving part of a report: what is derived, what is refused, and that reports without it stay readable."""

from __future__ import annotations

import json

import pytest
from coserving_tools import make_engines, make_latencies, make_serving
from pydantic import ValidationError

from rose.report.coserving import EngineTokens, Series, Serving, lent_share
from rose.report.model import RunReport


def test_round_trip(coserving_report: RunReport) -> None:
    text = coserving_report.to_json()
    assert RunReport.from_json(text) == coserving_report
    assert RunReport.from_json(RunReport.from_json(text).to_json()).to_json() == text


def test_a_report_from_before_co_serving_is_read(full_report: RunReport) -> None:
    held = json.loads(full_report.to_json())
    for later in ("engines", "serving", "sharing", "guest_share", "goodput_tokens_s", "update_bytes"):
        del held[later]
    assert RunReport.from_json(json.dumps(held)) == full_report


def test_guest_share_is_of_received_tokens(coserving_report: RunReport, full_report: RunReport) -> None:
    assert coserving_report.guest_share == pytest.approx(21_557 / 69_590)
    assert full_report.guest_share is None
    silent = [EngineTokens(engine_id="engine-0", kind="dedicated", tokens_received=0, requests=3)]
    assert lent_share(silent) is None
    assert lent_share(make_engines()[:1]) == 0.0


def test_goodput_is_trained_tokens_over_the_time_of_the_steps(full_report: RunReport) -> None:
    first, second = full_report.steps[:2]
    report = full_report.model_copy(update={"steps": (first, second)})
    times = [(step.rollout_s, step.train_s, step.publish_s, step.apply_s) for step in (first, second)]
    spent_s = sum(part for parts in times for part in parts if part is not None)
    assert report.goodput_tokens_s == pytest.approx((first.trained_tokens + second.trained_tokens) / spent_s)
    assert report.update_bytes == first.update_bytes + second.update_bytes
    assert full_report.model_copy(update={"steps": ()}).goodput_tokens_s is None


def test_ratios_are_shared_over_alone() -> None:
    serving = make_serving()
    assert serving.ratios["ttft_p95"] == pytest.approx(1.03)
    assert serving.ratios["ttft_p99"] == pytest.approx(1.03**2)
    none = make_latencies(shared=True).model_copy(update={"tpot_p95_ms": None})
    assert serving.model_copy(update={"shared": none}).ratios["tpot_p95"] is None
    still = make_latencies(shared=False).model_copy(update={"ttft_p50_ms": 0.0})
    assert serving.model_copy(update={"alone": still}).ratios["ttft_p50"] is None


@pytest.mark.parametrize(("kept", "met"), [(0.99, True), (0.9899, False), (1.0, True), (None, None)])
def test_the_slo_is_met_from_its_objective_on(kept: float | None, met: bool | None) -> None:
    shared = make_latencies(shared=True).model_copy(update={"slo_kept": kept})
    assert make_serving().model_copy(update={"shared": shared}).slo_met is met


def test_derived_figures_in_a_file_are_not_believed(coserving_report: RunReport) -> None:
    held = json.loads(coserving_report.to_json())
    assert held["serving"]["slo_met"] is True
    held["serving"]["slo_met"] = False
    held["serving"]["ratios"] = {}
    held["guest_share"] = 0.9
    again = RunReport.from_json(json.dumps(held))
    assert again == coserving_report
    assert again.guest_share == coserving_report.guest_share


@pytest.mark.parametrize(
    ("at_s", "values"), [((0.0, 1.0), (1.0,)), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 0.0), (1.0, 2.0)), ((), (1.0,))]
)
def test_a_series_has_one_value_for_each_of_increasing_times(
    at_s: tuple[float, ...], values: tuple[float, ...]
) -> None:
    with pytest.raises(ValidationError, match="increasing"):
        Series(what="compute", who="guest", at_s=at_s, values=values)


def test_a_value_that_is_not_finite_becomes_null() -> None:
    series = Series(what="compute", who="guest", at_s=(-1.0, 0.0, 1.0), values=(0.5, float("nan"), float("inf")))
    assert series.values == (0.5, None, None)


def test_a_serving_engine_without_a_bound_is_refused() -> None:
    with pytest.raises(ValidationError):
        Serving.model_validate(make_serving().model_dump() | {"slo_ttft_ms": 0.0})
