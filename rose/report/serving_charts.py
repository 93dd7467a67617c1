"""What the charts of co-serving show: latencies against the SLO, and who had the shared device when."""

from __future__ import annotations

from itertools import cycle

from rose.report.binned import bins_of
from rose.report.charts import Chart, Kind, Limit, Line
from rose.report.coserving import Measure, Sharing
from rose.report.model import RunReport
from rose.report.words import milliseconds

DEDICATED_COLOURS = ("green", "sky", "black")
LENT_COLOURS = ("orange", "purple", "yellow")


def colours(report: RunReport) -> dict[str, str]:
    """Who is drawn in which colour, everywhere on the page: serving, the guest, and each engine by its kind."""
    found = {"serving": "blue", "guest": LENT_COLOURS[0]}
    for kind, palette in (("dedicated", DEDICATED_COLOURS), ("lent", LENT_COLOURS)):
        names = [engine.engine_id for engine in report.engines if engine.kind == kind]
        found.update(zip(names, cycle(palette), strict=False))
    return found


def latency_charts(report: RunReport) -> list[Chart]:
    """TTFT and TPOT over time with the SLO."""
    if report.serving is None or report.sharing is None:
        return []
    draw = _Drawer(report, report.sharing)
    says = f"p95 of the last {report.sharing.window_s:.0f} s, as the client saw it."
    ttft, tpot = _slo(report.serving.slo_ttft_ms), _slo(report.serving.slo_tpot_ms)
    made = [
        draw.chart("ttft_p95_ms", "Time to first token", says, "ms", limit=ttft, wide=True),
        draw.chart("tpot_p95_ms", "Time per output token", says, "ms", limit=tpot, wide=True),
    ]
    return [chart for chart in made if chart is not None]


def share_charts(report: RunReport) -> list[Chart]:
    """Who computed, and who brought the rollout's tokens."""
    if report.sharing is None:
        return []
    draw = _Drawer(report, report.sharing)
    computing = "Share of time that each engine computed; blank is idle."
    tokens = f"Tokens each second, over the last {report.sharing.window_s:.0f} s, one engine on top of the other."
    made = [
        draw.chart("compute", "Compute of the shared device", computing, "%", kind="area", top=1.0, wide=True),
        draw.chart("rollout_tokens_s", "Rollout tokens by engine", tokens, "tokens/s", kind="area", wide=True),
    ]
    return [chart for chart in made if chart is not None]


def memory_and_version_charts(report: RunReport) -> list[Chart]:
    """KV memory, the gate, and the version that each engine sampled with."""
    if report.sharing is None:
        return []
    draw = _Drawer(report, report.sharing)
    memory = "Share of each engine's KV cache that requests held."
    gate = "Share of time in which serving's slack let the guest compute."
    versions = "What each engine sampled with. One may lag: each token says its version."
    made = [
        draw.chart("kv_used", "KV memory", memory, "%"),
        draw.chart("gate_open", "The guest's gate", gate, "%", top=1.0),
        draw.chart("weight_version", "Weight versions", versions, "", kind="steps"),
    ]
    return [chart for chart in made if chart is not None]


def _slo(bound_ms: float) -> Limit:
    return Limit(bound_ms, f"SLO {milliseconds(bound_ms)}")


class _Drawer:
    """Makes charts over time that share their bins and colours."""

    def __init__(self, report: RunReport, sharing: Sharing) -> None:
        self._sharing = sharing
        self._bins = bins_of(sharing, report.wall_s)
        self._colours = colours(report)

    def chart(
        self,
        what: Measure,
        title: str,
        says: str,
        unit: str,
        *,
        kind: Kind = "line",
        top: float | None = None,
        limit: Limit | None = None,
        wide: bool = False,
    ) -> Chart | None:
        """None if nothing of it was measured."""
        lines = [
            Line(who, self._colours.get(who, "grey"), self._bins.means(series))
            for who, series in self._sharing.of(what).items()
        ]
        lines = [line for line in lines if any(value is not None for value in line.values)]
        if not lines:
            return None
        x, x_label = self._bins.middles(), "since the run began, min:s"
        return Chart(
            what, title, says, x_label, unit, x, lines, kind=kind, top=top, limit=limit, wide=wide, x_time=True
        )
