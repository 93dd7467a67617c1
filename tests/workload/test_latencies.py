from __future__ import annotations

import math
from dataclasses import replace
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.slo import Slo
from rose.workload.latencies import (
    Percentiles,
    attained,
    percentiles,
    slo_from,
    summarised,
)
from rose.workload.load_record import LoadRecord, Outcome


def completed(
    ttft_s: float = 0.1, tpot_s: float = 0.01, tokens: int = 11, *, sent_s: float = 0.0, index: int = 0
) -> LoadRecord:
    first_s = sent_s + ttft_s
    last_s = first_s + tpot_s * (tokens - 1)
    gaps = (tpot_s,) * (tokens - 1)
    return LoadRecord(
        index, Outcome.COMPLETED, sent_s, last_s, 10, tokens, tokens, sent_s, first_s, last_s, gaps_s=gaps
    )


def ended(outcome: Outcome, at_s: float = 1.0) -> LoadRecord:
    return LoadRecord(0, outcome, 0.0, at_s, 10, 11, sent_s=None if outcome is Outcome.OVER_CAP else 0.0)


def test_figures_of_one_request() -> None:
    record = LoadRecord(0, Outcome.COMPLETED, 1.0, 2.0, 10, 5, 5, sent_s=1.25, first_s=1.5, last_s=2.0, gaps_s=(0.5,))
    assert (record.lag_s, record.ttft_s, record.tpot_s) == (0.25, 0.25, 0.125)
    alone = completed(tokens=1)
    assert alone.tpot_s is None
    assert ended(Outcome.OVER_CAP).ttft_s is None
    assert ended(Outcome.OVER_CAP).lag_s is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 3},
        {"tokens": 3, "sent_s": 1.0, "first_s": 1.0},
        {"sent_s": 1.0, "first_s": 1.0, "last_s": 1.0},
        {"tokens": 1, "first_s": 1.0, "last_s": 1.0},
        {"due_s": math.nan},
        {"gaps_s": (math.inf,)},
    ],
    ids=str,
)
def test_a_record_holds_its_invariants(changes: dict[str, object]) -> None:
    values: dict[str, object] = {"due_s": 0.0, "ended_s": 1.0, "prompt_tokens": 1, "asked_tokens": 3}
    with pytest.raises(ValueError, match="request 4"):
        LoadRecord(4, Outcome.BROKEN, **{**values, **changes})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=200))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    cuts = quantiles(values, n=100, method="inclusive")
    expected = (cuts[49], cuts[89], cuts[94], cuts[98], max(values))
    assert (found.p50, found.p90, found.p95, found.p99, found.longest) == pytest.approx(expected)
    assert found.mean == pytest.approx(sum(values) / len(values))


def test_percentiles_of_few_and_of_none() -> None:
    assert percentiles([None, 3.0]) == Percentiles(1, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)
    assert percentiles([None]) is None


def test_only_completed_requests_have_latencies_and_all_are_counted() -> None:
    half = LoadRecord(1, Outcome.BROKEN, 0.0, 9.0, 10, 11, 3, sent_s=0.0, first_s=5.0, last_s=9.0, gaps_s=(2.0, 2.0))
    summary = summarised([completed(), half, ended(Outcome.OVER_CAP), ended(Outcome.CUT)])
    assert summary.ttft is not None
    assert (summary.ttft.count, summary.ttft.longest) == (1, pytest.approx(0.1))
    assert summary.gaps is not None
    assert summary.gaps.count == 10
    assert summary.tokens == 14
    assert summary.requests == 4
    assert summary.outcomes[Outcome.BROKEN] == 1
    assert summary.lag is not None
    assert summary.lag.count == 3


def test_attainment_charges_every_failure_but_our_own_cut() -> None:
    slo = Slo(0.1, 0.01)
    records = [
        completed(0.1 - 1e-9, 0.01 - 1e-9),
        completed(0.2, 0.005),
        completed(0.05, 0.02),
        completed(0.05, 0.02, tokens=1),
        # Fast as far as it went.
        replace(completed(0.05, 0.005), outcome=Outcome.BROKEN),
        *(ended(one) for one in (Outcome.REFUSED, Outcome.BROKEN, Outcome.TIMED_OUT, Outcome.OVER_CAP, Outcome.CUT)),
    ]
    found = attained(records, slo)
    assert (found.requests, found.met, found.ttft_met, found.tpot_met) == (9, 2, 3, 3)
    assert found.fraction == 2 / 9
    assert attained([ended(Outcome.CUT)], slo).fraction is None


def test_the_slo_is_alones_p99_with_a_margin() -> None:
    alone = summarised([completed(index / 1000, index / 10_000) for index in range(1, 101)])
    assert alone.ttft is not None
    assert alone.tpot is not None
    slo = slo_from(alone)
    assert slo.ttft_s == pytest.approx(1.6 * alone.ttft.p99)
    assert slo.tpot_s == pytest.approx(1.27 * alone.tpot.p99)
    assert slo_from(alone, 2.0, 3.0) == Slo(2 * alone.ttft.p99, 3 * alone.tpot.p99)
    for little in ([], [ended(Outcome.BROKEN)], [completed(tokens=1)]):
        with pytest.raises(ConfigError, match="no SLO from"):
            slo_from(summarised(little))
    with pytest.raises(ConfigError, match="no SLO: ttft_s"):
        Slo(0.0, 1.0)
