"""The report as data: what is derived, what survives a round trip, what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rose.errors import ConfigError
from rose.report.model import EngineRestart, LedgerSummary, Message, RunReport, wilson_interval


def strict(text: str) -> Any:
    """Parse JSON as other languages do: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def minimal(**more: Any) -> RunReport:
    facts: dict[str, Any] = {
        "run_id": "r",
        "name": "n",
        "started_at": "2026-08-01T12:00:00+00:00",
        "wall_s": 1.0,
        "outcome": "stopped",
        "ledger": LedgerSummary(accounts={}, generated=0),
        "versions_published": 0,
    }
    return RunReport(**facts | more)


def test_round_trip(full_report: RunReport) -> None:
    text = full_report.to_json()
    assert RunReport.from_json(text) == full_report
    assert RunReport.from_json(RunReport.from_json(text).to_json()).to_json() == text


def test_headline_figures_stand_in_the_file(full_report: RunReport) -> None:
    held = strict(full_report.to_json())
    assert held["success_before"] == 0.1133
    assert held["success_after"] == 0.5176
    assert held["success_gain"] == pytest.approx(0.4043)
    assert held["ledger"]["gap"] == 0
    assert held["parity_max"] == max(step["parity_max"] for step in held["steps"])
    low, high = held["evaluations"][0]["success_ci95"]
    assert low < 0.1133 < high


def test_derived_figures_in_a_file_are_not_believed(full_report: RunReport) -> None:
    held = strict(full_report.to_json())
    held["success_after"] = 1.0
    held["ledger"]["gap"] = 5
    again = RunReport.from_json(json.dumps(held))
    assert again.success_after == 0.5176
    assert again.ledger.gap == 0


def test_gap_is_generated_minus_accounts() -> None:
    assert LedgerSummary(accounts={"trained": 5, "evaluation": 2}, generated=10).gap == 3
    assert LedgerSummary(accounts={"trained": 5}, generated=4).gap == -1


def test_one_evaluation_gives_no_gain(full_report: RunReport) -> None:
    report = minimal(evaluations=full_report.evaluations[:1])
    assert (report.success_before, report.success_after, report.success_gain) == (0.1133, None, None)
    assert minimal().success_before is None
    assert minimal().parity_max is None


@given(st.floats(), st.floats())
def test_numbers_that_are_not_finite_become_null(value: float, nested: float) -> None:
    report = minimal(job={"a": [{"b": nested}]})
    text = report.to_json()
    held = strict(text)["job"]["a"][0]["b"]
    assert held == (nested if math.isfinite(nested) else None)
    assert RunReport.from_json(text) == report


def test_a_loss_that_is_not_finite_becomes_null(full_report: RunReport) -> None:
    fields = full_report.steps[0].model_dump() | {"loss": math.nan, "grad_norm": math.inf, "kl": -math.inf}
    step = type(full_report.steps[0]).model_validate(fields)
    assert (step.loss, step.grad_norm, step.kl) == (None, None, None)


def test_a_count_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValidationError):
        minimal(wall_s=math.nan)


def test_half_a_character_becomes_a_question_mark() -> None:
    report = minimal(cause="bad \udcff byte", environment_failures={"\ud800": 1})
    assert report.cause == "bad ? byte"
    assert RunReport.from_json(report.to_json()) == report
    assert Message(role="user", text="\udfff").text == "?"
    assert EngineRestart(at_s=1.0, engine_id="engine-0", cause="\ud800").cause == "?"


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="succes"):
        minimal(succes=1.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 2}', "null"])
def test_anything_else_is_not_a_report(text: str) -> None:
    with pytest.raises(ConfigError, match="not a run report"):
        RunReport.from_json(text)


def test_a_report_of_another_schema_is_refused(full_report: RunReport) -> None:
    held = strict(full_report.to_json()) | {"schema_version": 2}
    with pytest.raises(ConfigError, match="schema version 1"):
        RunReport.from_json(json.dumps(held))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0), (58, 512, 0.08866, 0.14366)],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=2e-5)


@given(st.integers(1, 10_000).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_wilson_interval_holds_the_rate(counts: tuple[int, int]) -> None:
    low, high = wilson_interval(*counts)
    assert 0 <= low <= counts[0] / counts[1] + 1e-12
    assert counts[0] / counts[1] - 1e-12 <= high <= 1


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_of_nonsense(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="trials"):
        wilson_interval(successes, trials)
