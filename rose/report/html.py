"""The report as one page that opens from a file: no network, nothing loaded, nothing executed but our own script.

Invariants
- Every text is escaped; transcripts and causes come from models and environments and are not trusted.
- The page's own policy allows exactly the style sheets and scripts embedded here, by hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rose.report.bars import account_bars
from rose.report.charts import step_charts, success_chart, time_chart
from rose.report.claim import claim
from rose.report.comparison import budget, comparisons
from rose.report.model import RunReport, Sample
from rose.report.serving_charts import colours, latency_charts, memory_and_version_charts, share_charts
from rose.report.tables import number_tables
from rose.report.timeline import timeline
from rose.report.words import clock, duration, kept, milliseconds, moment, percent, ratio, seconds, tiny

SCRIPTS = ("uplot/uPlot.iife.min.js", "report.js")
STYLES = ("uplot/uPlot.min.css", "report.css")


def render_html(report: RunReport) -> str:
    """The whole page. About 80 KB plus the transcripts."""
    scripts = [_asset(name) for name in SCRIPTS]
    styles = [_asset(name) for name in STYLES]
    wide = [chart for chart in (success_chart(report), time_chart(report)) if chart is not None]
    small = step_charts(report)
    latency, share, device = latency_charts(report), share_charts(report), memory_and_version_charts(report)
    return (
        _templates()
        .get_template("template.html.jinja")
        .render(
            report=report,
            scripts=scripts,
            styles=styles,
            policy=_policy(scripts, styles),
            wide_charts=wide,
            small_charts=small,
            latency_charts=latency,
            share_charts=share,
            device_charts=device,
            chart_data={chart.chart_id: chart.to_json() for chart in (*latency, *share, *wide, *device, *small)},
            claim=claim(report),
            comparisons=[] if report.serving is None else comparisons(report.serving),
            budget=None if report.serving is None else budget(report.serving),
            colours=colours(report),
            lent=any(engine.kind == "lent" for engine in report.engines),
            accounts=account_bars(report.ledger),
            timeline=timeline(report),
            guest_faults=guest_faults(report),
            sample_pairs=sample_pairs(report.samples),
            tables=number_tables(report),
            job_rows=list(flat(report.job)),
            machine_rows=list(flat(report.machine)),
        )
    )


def sample_pairs(samples: tuple[Sample, ...]) -> list[tuple[int, Sample | None, Sample | None]]:
    """(task seed, before, after) in order of first appearance; None where one side is missing."""
    pairs: dict[int, dict[str, Sample]] = {}
    for sample in samples:
        pairs.setdefault(sample.task_seed, {}).setdefault(sample.when, sample)
    return [(seed, pair.get("before"), pair.get("after")) for seed, pair in pairs.items()]


def guest_faults(report: RunReport) -> list[tuple[int, str]]:
    """How often the guest was restarted or cut back, in words; what never happened is left out."""
    sharing = report.sharing
    if sharing is None:
        return []
    counts = [
        (sharing.guest_restarts, "restart", "of the guest engine"),
        (sharing.preemptions, "request", "of the guest lost memory to serving and computed it again"),
        (sharing.starvations, "time", "that the guest had too little memory for a single request"),
    ]
    return [(count, f"{noun if count == 1 else noun + 's'} {words}") for count, noun, words in counts if count]


def flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as (dotted key, value in words)."""
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _asset(name: str) -> str:
    return files("rose.report").joinpath("assets", name).read_text(encoding="utf-8").strip()


def _policy(scripts: list[str], styles: list[str]) -> str:
    def hashes(texts: list[str]) -> str:
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts
        )

    allowed = f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}"
    return f"{allowed}; base-uri 'none'; form-action 'none'"


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("rose.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for words in (clock, duration, kept, milliseconds, moment, percent, ratio, seconds, tiny):
        environment.filters[words.__name__] = words
    return environment
