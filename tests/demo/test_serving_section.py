"""What the report says of serving: which requests count, and what of them."""

from __future__ import annotations

import pytest

from rose.demo.serving_section import Window, figures, serving_section, training_window, within
from rose.report.model import LedgerSummary, Phase, RunReport
from rose.slo import Slo
from rose.workload.latencies import slo_from, summarised
from rose.workload.load_record import LoadRecord, Outcome
from rose.workload.record_file import Replay
from rose.workload.trace import Trace, TraceRequest

SLO = Slo(0.2, 0.02)
TRACE = Trace("t", "from somewhere", (TraceRequest(0.0, 10, 11), TraceRequest(1.0, 10, 11)), 2.0, history=("cut",))


def answered(index: int, due_s: float, ttft_s: float = 0.1, tpot_s: float = 0.01) -> LoadRecord:
    first_s = due_s + ttft_s
    return LoadRecord(
        *(index, Outcome.COMPLETED, due_s),
        ended_s=first_s + 10 * tpot_s,
        prompt_tokens=10,
        asked_tokens=11,
        tokens=11,
        sent_s=due_s,
        first_s=first_s,
        last_s=first_s + 10 * tpot_s,
    )


def failed(index: int, outcome: Outcome) -> LoadRecord:
    return LoadRecord(index, outcome, due_s=0.0, ended_s=0.5, prompt_tokens=10, asked_tokens=11, sent_s=0.0)


def replay(began_s: float, *records: LoadRecord) -> Replay:
    return Replay({"began_at": began_s}, list(records), {"signal": 0})


def report(*phases: Phase) -> RunReport:
    ledger = LedgerSummary(accounts={}, generated=0)
    return RunReport(
        run_id="r", name="r", started_at="", wall_s=9.0, outcome="finished", ledger=ledger, versions_published=0,
        phases=phases,
    )  # fmt: skip


def test_the_window_spans_all_training_and_nothing_else() -> None:
    phases = (
        *(Phase(name="start of engine and ranks", start_s=0, end_s=20), Phase(name="evaluation", start_s=20, end_s=25)),
        *(Phase(name="rollout", start_s=25, end_s=30), Phase(name="apply", start_s=33, end_s=34)),
        Phase(name="evaluation", start_s=34, end_s=40),
    )
    assert training_window(report(*phases), 1000.0) == Window(1025.0, 1034.0)


def test_without_training_the_window_is_empty() -> None:
    window = training_window(report(Phase(name="evaluation", start_s=0, end_s=20)), 1000.0)
    assert window.length_s == 0.0
    assert within(replay(999.0, answered(0, 1.0)), window) == []


def test_only_requests_that_were_due_and_ended_inside_the_window_count() -> None:
    one = replay(1000.0, answered(0, 0.0), answered(1, 2.0), answered(2, 4.0))
    assert [record.index for record in within(one, Window(1001.0, 1004.1))] == [1]


def test_a_replay_that_never_said_when_it_began_counts_for_nothing() -> None:
    assert within(Replay({}, [answered(0, 0.0)]), Window(0.0, 1e10)) == []


def test_figures_are_in_milliseconds_and_charge_the_engine_with_what_it_did_not_answer() -> None:
    found = figures([answered(0, 0.0), answered(1, 1.0, ttft_s=0.3), failed(2, Outcome.BROKEN)], SLO, 2.0)
    assert (found.requests, found.tokens, found.duration_s) == (3, 22, 2.0)
    assert found.outcomes == {"completed": 2, "broken": 1}
    assert found.ttft_p50_ms == pytest.approx(200)
    assert found.tpot_p99_ms == pytest.approx(10)
    assert (found.slo_kept, found.ttft_kept, found.tpot_kept) == pytest.approx((1 / 3, 1 / 3, 2 / 3))
    assert found.client_lag_p99_ms == 0.0


def test_what_the_end_of_the_replay_cut_judges_nobody() -> None:
    assert figures([answered(0, 0.0), failed(1, Outcome.CUT)], SLO, 1.0).slo_kept == 1.0
    nothing = figures([failed(1, Outcome.CUT)], SLO, 1.0)
    assert (nothing.slo_kept, nothing.ttft_p95_ms) == (None, None)


def test_the_section_sets_both_stretches_side_by_side() -> None:
    alone = replay(900.0, answered(0, 0.0), answered(1, 1.0))
    slo = slo_from(summarised(alone.records))
    replays = [
        replay(1000.0, answered(0, 0.0, ttft_s=0.2), answered(1, 1.0, ttft_s=0.2)),
        replay(1010.0, answered(0, 0.0)),
    ]
    section = serving_section(TRACE, slo, alone, replays, Window(1000.0, 1005.0))
    assert (section.replays, section.alone.requests, section.shared.requests) == (1, 2, 2)
    assert (section.slo_ttft_ms, section.slo_tpot_ms) == pytest.approx((160.0, 12.7))
    assert section.around is not None
    assert (section.around.requests, section.around.slo_kept) == (1, 1.0)
    # From 1000 to the end of the last request, at 1010.2, less the window.
    assert section.around.duration_s == pytest.approx(5.2)
    assert section.ratios["ttft_p95"] == pytest.approx(2.0)
    assert section.ratios["tpot_p95"] == pytest.approx(1.0)
    assert section.slo_met is False
    assert (section.history, section.attribution, section.rate_rps) == (("cut",), "from somewhere", 1.0)
