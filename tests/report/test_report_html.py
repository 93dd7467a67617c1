"""The page: everything escaped, nothing from outside, every figure where it should be."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from coserving_tools import make_latencies, make_serving, make_sharing

from rose.ledger import Account
from rose.report.bars import MEANINGS, account_bars
from rose.report.charts import step_charts, success_chart, time_chart
from rose.report.coserving import EngineTokens, Series
from rose.report.html import flat, render_html, sample_pairs
from rose.report.model import Alarm, EngineRestart, LedgerSummary, Message, Phase, RunReport, Sample

PAYLOADS = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"><svg onload=document.title='owned'>",
    "</pre></title></style><!-- & &lt; {{ 7 * 7 }} {% raw %}",
    "]]>\u2028\u2029\x00\u202e",
]


class Page(HTMLParser):
    """Counts elements and keeps the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "pre": []}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self._open = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.tags if name == tag)


def poisoned(report: RunReport, payload: str) -> RunReport:
    """The payload wherever text from outside can stand."""
    transcript = (Message(role=payload, text=payload),)
    changes = {
        "name": payload,
        "run_id": payload,
        "started_at": payload,
        "outcome": "stopped",
        "cause": payload,
        "machine": {payload: payload},
        "packages": {payload: payload},
        "job": {payload: {payload: [payload]}},
        "alarms": (Alarm(version=1, what=payload),),
        "engine_restarts": (EngineRestart(at_s=1, engine_id=payload, cause=payload),),
        "environment_failures": {payload: 1},
        "samples": (Sample(when="before", task_seed=1, success=True, reward=1.0, transcript=transcript),),
        "phases": (Phase(name=payload, start_s=0, end_s=1),),
        "ledger": LedgerSummary(accounts={payload: 1}, generated=1, violations=(payload,)),
        "steps": tuple(step.model_copy(update={"outcomes": {payload: 1}}) for step in report.steps),
    }
    coserving = {
        "engines": (EngineTokens(engine_id=payload, kind="lent", tokens_received=1, requests=1),),
        "serving": make_serving().model_copy(
            update={
                "trace": payload,
                "attribution": payload,
                "history": (payload,),
                "shared": make_latencies(shared=True).model_copy(update={"outcomes": {payload: 1}}),
            }
        ),
        "sharing": make_sharing().model_copy(
            update={
                "partition": payload,
                "series": tuple(
                    Series(what=what, who=payload, at_s=(0.0, 1.0), values=(0.5, 0.5))
                    for what in ("compute", "rollout_tokens_s", "ttft_p95_ms")
                ),
            }
        ),
    }
    return report.model_copy(update=changes | coserving)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_from_outside_stays_text(full_report: RunReport, payload: str) -> None:
    clean = Page(render_html(poisoned(full_report, "harmless")))
    page = Page(render_html(poisoned(full_report, payload)))
    assert [name for name, _ in page.tags] == [name for name, _ in clean.tags]
    assert [attributes.keys() for _, attributes in page.tags] == [attributes.keys() for _, attributes in clean.tags]
    assert page.texts["pre"] == [payload]


def test_policy_allows_exactly_what_is_embedded(full_report: RunReport) -> None:
    page = Page(render_html(full_report))
    policy = next(a["content"] or "" for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))

    def hashes(texts: list[str]) -> set[str]:
        return {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts}

    allowed = {part.split()[0]: set(re.findall(r"'sha256-([^']+)'", part)) for part in policy.split(";")}
    data, *scripts = page.texts["script"]
    assert allowed["script-src"] == hashes(scripts)
    assert allowed["style-src"] == hashes(page.texts["style"])
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(json.loads(data)) >= {"success", "time", "malformed"}


def test_page_loads_nothing_and_runs_no_inline_handlers(full_report: RunReport) -> None:
    for tag, attributes in Page(render_html(full_report)).tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not {name for name in attributes if name.startswith("on") or name in {"src", "href", "style"}}


def test_a_plain_run_says_nothing_of_serving(full_report: RunReport) -> None:
    text = render_html(full_report)
    for words in ("Serving", "Who ran what", "On lent time", "shared device", "Engines and weights"):
        assert words not in text


def test_headline(full_report: RunReport) -> None:
    text = render_html(full_report)
    for words in ("11 %", "52 %", "+40.4", "all accounted for", "1.7e-5", "within 1e-4", "2:31", "69,651"):
        assert words in text
    assert "Stopped before its end" not in text


def test_a_gap_and_a_failed_parity_are_told(full_report: RunReport) -> None:
    accounts = full_report.ledger.accounts | {"trained": 0}
    ledger = full_report.ledger.model_copy(update={"accounts": accounts, "violations": ("settled twice: t-1",)})
    text = render_html(full_report.model_copy(update={"ledger": ledger, "parity_tolerance": 1e-6}))
    assert "29,812 unexplained" in text
    assert "all accounted for" not in text
    assert "above 1e-6" in text
    assert "settled twice: t-1" in text


def test_a_run_that_ended_at_once_has_a_page_too() -> None:
    report = RunReport(
        run_id="r",
        name="n",
        started_at="now",
        wall_s=0.0,
        outcome="stopped",
        cause="Ctrl-C",
        ledger=LedgerSummary(accounts={}, generated=0),
        versions_published=0,
    )
    page = render_html(report)
    assert "Nothing was evaluated" in page
    assert "Ctrl-C" in page
    assert Page(page).count("figure") == 0


def test_every_account_of_the_ledger_has_a_meaning() -> None:
    assert set(MEANINGS) == {account.value for account in Account}


def test_account_bars_fill_the_whole(full_report: RunReport) -> None:
    bars = account_bars(full_report.ledger)
    assert [bar.name for bar in bars][:2] == ["trained", "evaluation"]
    assert sum(bar.width for bar in bars) == pytest.approx(100)
    assert all(left.left + left.width == pytest.approx(right.left) for left, right in pairwise(bars))


def test_account_bars_never_overflow() -> None:
    bars = account_bars(LedgerSummary(accounts={"trained": 30, "stale": -5, "new": 10}, generated=20))
    assert sum(bar.width for bar in bars) <= 120
    assert all(bar.width >= 0 for bar in bars)
    assert bars[-1].name == "new"


def test_success_is_charted_by_the_policy_that_sampled(full_report: RunReport) -> None:
    chart = success_chart(full_report)
    assert chart is not None
    training, held_out = chart.series
    assert chart.x == list(range(13))
    assert training.values[0] == full_report.steps[0].success
    assert training.values[-1] is None
    assert held_out.values[0] == 0.1133
    assert held_out.values[-1] == 0.5176
    assert held_out.low is not None
    assert held_out.low[1] is None


def test_charts_with_nothing_measured_are_left_out(full_report: RunReport) -> None:
    steps = tuple(step.model_copy(update={"parity_max": None, "kl": None}) for step in full_report.steps)
    made = {chart.chart_id for chart in step_charts(full_report.model_copy(update={"steps": steps}))}
    assert made.isdisjoint({"parity", "kl"})
    assert {"malformed", "entropy"} <= made
    assert time_chart(full_report.model_copy(update={"steps": ()})) is None


def test_a_parity_of_exactly_zero_cannot_stand_on_a_log_scale(full_report: RunReport) -> None:
    steps = (full_report.steps[0].model_copy(update={"parity_max": 0.0}), full_report.steps[1])
    chart = next(c for c in step_charts(full_report.model_copy(update={"steps": steps})) if c.chart_id == "parity")
    assert chart.series[0].values == [None, full_report.steps[1].parity_max]


def test_samples_of_one_task_stand_side_by_side(full_report: RunReport) -> None:
    before, after = full_report.samples
    other = after.model_copy(update={"task_seed": 7})
    assert sample_pairs((before, other, after)) == [(900_001, before, after), (7, None, other)]


def test_flat() -> None:
    assert list(flat({"a": {"b": 1, "c": {}}, "d": "x", "e": [1, None]})) == [
        ("a.b", "1"),
        ("a.c", "{}"),
        ("d", "x"),
        ("e", "[1, null]"),
    ]


def test_the_difference_between_trainer_and_engine_stands_with_its_reason(full_report: RunReport) -> None:
    chart = next(c for c in step_charts(full_report) if c.chart_id == "mismatch")
    assert "float32 weights" in chart.says
    assert "rounded to bf16" in chart.says
