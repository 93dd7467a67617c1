"""The co-serving part of the page: the claim, the verdict, the bars, the lanes, and what is left out."""

from __future__ import annotations

import re

import pytest
from coserving_tools import make_engines, make_latencies, make_serving, make_sharing

from rose.report.binned import BINS_MAX, Bins, bins_of
from rose.report.claim import claim
from rose.report.comparison import FULL_PERCENT, budget, comparisons
from rose.report.coserving import EngineTokens, Series, Sharing
from rose.report.html import guest_faults, render_html
from rose.report.model import Phase, RunReport
from rose.report.serving_charts import colours, latency_charts, memory_and_version_charts, share_charts
from rose.report.timeline import engine_lanes, phase_lanes, ticks, timeline
from rose.report.words import clock, kept, milliseconds, serving_words, summary_lines


def with_shared(report: RunReport, **figures: object) -> RunReport:
    shared = make_latencies(shared=True).model_copy(update=figures)
    return report.model_copy(update={"serving": make_serving().model_copy(update={"shared": shared})})


def said(report: RunReport) -> str:
    return "".join(piece.text for piece in claim(report))


def test_the_claim_in_one_sentence(coserving_report: RunReport) -> None:
    assert said(coserving_report) == (
        "Held-out success rose from 11 % to 52 %, 31 % of the rollout came from lent serving time, serving saw 1.03× "
        "the p95 time to first token and 1.03× the p95 time per token of serving alone; the SLO was kept by 99.6 % of "
        "requests."
    )
    figures = [piece.text for piece in claim(coserving_report) if piece.figure]
    assert figures == ["from 11 % to 52 %", "31 %", "1.03×", "1.03×", "99.6 %"]


def test_a_missed_slo_is_said_as_plainly(coserving_report: RunReport) -> None:
    missed = with_shared(coserving_report, slo_kept=0.971)
    assert said(missed).endswith("; the SLO was missed: only 97.1 % of requests kept it.")
    text = render_html(missed)
    assert "SLO missed" in text
    assert "290 % of the error budget spent" in text
    assert "SLO kept" not in text
    assert "MISSED: 97.1 %" in "\n".join(summary_lines(missed, None))


def test_what_was_not_measured_is_not_claimed(coserving_report: RunReport) -> None:
    bare = with_shared(coserving_report, slo_kept=None, ttft_p95_ms=None, tpot_p95_ms=None)
    bare = bare.model_copy(update={"engines": (), "evaluations": ()})
    assert said(bare) == "No request judged the SLO."
    assert "No request judged the SLO" in render_html(bare)
    assert serving_words(bare.serving or make_serving()).startswith("p95 of the first token – of alone")


def test_a_ratio_below_one_is_no_gain_and_the_other_is_shown_beside_it(coserving_report: RunReport) -> None:
    words = "Below 1× is the machine"
    assert words not in render_html(coserving_report)
    text = render_html(with_shared(coserving_report, ttft_p95_ms=32.0))
    assert words in text
    assert "<strong>0.50×</strong></p>" in text
    assert "<strong>1.03×</strong></p>" in text


def test_what_users_saw_around_training_stands_in_a_row_of_its_own(coserving_report: RunReport) -> None:
    assert "Around training" not in render_html(coserving_report)
    around = make_latencies(shared=True).model_copy(update={"slo_kept": 0.954})
    serving = make_serving().model_copy(update={"around": around})
    text = render_html(coserving_report.model_copy(update={"serving": serving}))
    assert ">Around training</th>" in text
    assert "95.4 %" in text
    empty = serving.model_copy(update={"around": around.model_copy(update={"requests": 0})})
    assert "Around training" not in render_html(coserving_report.model_copy(update={"serving": empty}))


def test_success_that_fell_did_not_rise(coserving_report: RunReport) -> None:
    backwards = coserving_report.model_copy(update={"evaluations": coserving_report.evaluations[::-1]})
    assert said(backwards).startswith("Held-out success fell from 52 % to 11 %")


def test_a_plain_run_claims_nothing(full_report: RunReport) -> None:
    assert claim(full_report) == ()
    assert timeline(full_report).run_from == 0.0
    assert latency_charts(full_report) == share_charts(full_report) == memory_and_version_charts(full_report) == []


def test_a_run_on_engines_of_its_own_says_nothing_of_lent_ones(full_report: RunReport) -> None:
    alone = full_report.model_copy(update={"engines": make_engines()[:1]})
    text = render_html(alone)
    assert "engine-0" in text
    assert "On lent time" not in text
    assert "lent engines" not in text + "".join(summary_lines(alone, None))


def test_the_page_of_a_co_served_run(coserving_report: RunReport) -> None:
    text = render_html(coserving_report)
    for words in (
        "1.03×",
        "64.0 ms alone",
        "65.9 ms shared",
        "99.6 % of requests within it",
        "32 % of the error budget spent",
        "azure_2023_conv",
        "CC-BY 4.0",
        "completed 315, timed out 1",
        "SLO 141 ms",
        "lent engines fetched 1.2 MB",
        "Who ran what",
    ):
        assert words in text
    assert len(re.findall(r'class="lane engine"', text)) == 3


def test_serving_without_what_was_watched_and_the_other_way_round(coserving_report: RunReport) -> None:
    assert "Serving, alone and shared" in render_html(coserving_report.model_copy(update={"sharing": None}))
    assert "The shared device" in render_html(coserving_report.model_copy(update={"serving": None}))
    empty = coserving_report.model_copy(update={"sharing": Sharing(partition="nice"), "phases": ()})
    assert 'class="lane engine"' not in render_html(empty)


@pytest.mark.parametrize(
    ("share", "words"), [(1.0, "100 %"), (0.99999, "99.9 %"), (0.29, "29.0 %"), (0.0, "0.0 %"), (0.9, "90.0 %")]
)
def test_a_share_is_never_rounded_up_to_all(share: float, words: str) -> None:
    assert kept(share) == words


def test_times_in_words() -> None:
    assert (clock(-60.0), clock(0.0), clock(65.0), clock(-0.4)) == ("−1:00", "0:00", "1:05", "0:00")
    assert [milliseconds(one) for one in (None, 1234.4, 99.96, 5.1)] == ["–", "1,234 ms", "100.0 ms", "5.10 ms"]


def test_bars_of_one_kind_have_one_scale_and_end_within_the_edge() -> None:
    rows = comparisons(make_serving())
    assert [row.level for row in rows] == ["p50", "p95", "p99"] * 2
    for row in rows:
        assert row.slo_at == FULL_PERCENT
        assert row.shared_bar == pytest.approx(FULL_PERCENT * (row.shared_ms or 0) / row.slo_ms)
        assert row.alone_bar < row.shared_bar < FULL_PERCENT


def test_a_bar_beyond_the_slo_moves_the_slo_to_the_left() -> None:
    shared = make_latencies(shared=True).model_copy(update={"ttft_p99_ms": 281.6})
    rows = comparisons(make_serving().model_copy(update={"shared": shared}))
    assert rows[2].shared_bar == FULL_PERCENT
    assert [row.slo_at for row in rows[:3]] == [pytest.approx(FULL_PERCENT / 2)] * 3


def test_the_budget_is_the_share_that_may_miss() -> None:
    spent = budget(make_serving())
    assert spent is not None
    assert (spent.spent, spent.bar, spent.allowed_at) == (pytest.approx(0.32), pytest.approx(32), 100)
    overdrawn = make_latencies(shared=True).model_copy(update={"slo_kept": 0.96})
    spent = budget(make_serving().model_copy(update={"shared": overdrawn}))
    assert spent is not None
    assert (spent.spent, spent.bar, spent.allowed_at) == (pytest.approx(4), 100, pytest.approx(25))


def test_series_of_different_moments_stand_in_the_same_bins() -> None:
    bins = Bins(start_s=-10.0, width_s=5.0, count=3)
    series = Series(what="compute", who="guest", at_s=(-11.0, -10.0, -6.0, 0.0, 5.0), values=(9.0, 1.0, 3.0, None, 9.0))
    assert bins.means(series) == [2.0, None, None]
    assert bins.middles() == [-7.5, -2.5, 2.5]


def test_bins_hold_every_moment_and_are_not_too_many() -> None:
    long = Series(what="compute", who="guest", at_s=tuple(range(-60, 7200)), values=(1.0,) * 7260)
    bins = bins_of(Sharing(partition="p", series=(long,)), 7000.0)
    assert bins.count <= BINS_MAX + 1
    assert all(value == 1.0 for value in bins.means(long))
    assert bins.start_s == -60
    coarse = Series(what="compute", who="guest", at_s=(0.0, 10.0, 20.0), values=(1.0, 1.0, 1.0))
    assert None not in bins_of(Sharing(partition="p", series=(coarse,)), 20.0).means(coarse)
    assert bins_of(Sharing(partition="p"), 0.0).count >= 1


def test_colours_tell_dedicated_and_lent_apart(coserving_report: RunReport) -> None:
    found = colours(coserving_report)
    assert found["serving"] != found["guest"] == found["lent-0"] != found["engine-0"]
    many = tuple(
        EngineTokens(engine_id=f"lent-{number}", kind="lent", tokens_received=0, requests=0) for number in range(9)
    )
    report = coserving_report.model_copy(update={"engines": make_engines()[:1] + many})
    assert len(colours(report)) == 2 + 10
    assert "lent-8" in render_html(report)


def test_charts_stand_over_one_stretch_and_leave_out_what_is_unknown(coserving_report: RunReport) -> None:
    made = [
        *latency_charts(coserving_report),
        *share_charts(coserving_report),
        *memory_and_version_charts(coserving_report),
    ]
    assert [chart.chart_id for chart in made] == [
        "ttft_p95_ms",
        "tpot_p95_ms",
        "compute",
        "rollout_tokens_s",
        "kv_used",
        "gate_open",
        "weight_version",
    ]
    assert len({tuple(chart.x) for chart in made}) == 1
    assert made[0].limit is not None
    assert made[0].limit.value == pytest.approx(140.8)
    silent = tuple(
        Series(what=series.what, who=series.who, at_s=series.at_s, values=(None,) * len(series.values))
        for series in make_sharing().series
    )
    sharing = make_sharing().model_copy(update={"series": silent})
    assert latency_charts(coserving_report.model_copy(update={"sharing": sharing})) == []


def test_lanes_of_engines_then_of_phases(coserving_report: RunReport) -> None:
    shown = timeline(coserving_report)
    assert [lane.name for lane in shown.lanes][:4] == ["serving", "guest", "engine-0", "set-up"]
    serving, guest, dedicated, set_up = shown.lanes[:4]
    assert serving.outline.startswith("M0 100H0.0V")
    assert not set_up.outline
    assert guest.total.endswith("% busy")
    assert dedicated.total.endswith("of its best")
    assert set_up.stretches[0][0] == pytest.approx(shown.run_from)
    assert 20 < shown.run_from < 40
    assert (shown.run_from, 0) in [(pytest.approx(left), at_s) for left, at_s in shown.ticks]


def test_no_lane_is_higher_than_its_place() -> None:
    wild = Series(what="compute", who="serving", at_s=(0.0, 2.0, 4.0, 6.0), values=(1.5, None, -0.5, 0.5))
    (lane,) = engine_lanes(Sharing(partition="p", series=(wild,)), Bins(0.0, 2.0, 4), {})
    assert lane.outline == "M0 100H0.0V0H250.0V100H750.0V50H1000V100Z"


def test_a_lent_engine_without_compute_has_a_lane_of_its_own(coserving_report: RunReport) -> None:
    series = tuple(one for one in make_sharing().series if one.what != "compute")
    sharing = make_sharing().model_copy(update={"series": series})
    names = [lane.name for lane in timeline(coserving_report.model_copy(update={"sharing": sharing})).lanes]
    assert names[:2] == ["engine-0", "lent-0"]


def test_lanes_and_ticks() -> None:
    phases = (
        Phase(name="b", start_s=10, end_s=20),
        Phase(name="a", start_s=0, end_s=10),
        Phase(name="b", start_s=30, end_s=40),
    )
    first, second = phase_lanes(phases, 0, 40)
    assert (first.name, first.total, first.stretches) == ("a", "10.0 s", [(0, 25)])
    assert (second.name, second.total, second.stretches) == ("b", "20.0 s", [(25, 25), (75, 25)])
    assert phase_lanes(phases, -40, 40)[0].stretches == [(50, 12.5)]
    assert ticks(0, 40) == [(0, 0), (25, 10), (50, 20), (75, 30), (100, 40)]
    assert ticks(-25, 25) == [(10, -20), (30, -10), (50, 0), (70, 10), (90, 20)]
    assert len(ticks(0, 36_000 * 5)) <= 8


def test_faults_of_the_guest_are_told_in_words(coserving_report: RunReport, full_report: RunReport) -> None:
    assert guest_faults(coserving_report) == [
        (1, "restart of the guest engine"),
        (4, "requests of the guest lost memory to serving and computed it again"),
    ]
    assert guest_faults(full_report) == []
    text = render_html(coserving_report.model_copy(update={"engine_restarts": (), "environment_failures": {}}))
    assert "restart of the guest engine" in text
    assert "No engine was restarted" not in text
