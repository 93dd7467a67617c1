"""Which series each chart of the page shows, in what colour and under what name. Pure: data and words, no drawing.

Invariants
- A chart without a series is not made. One with many shows `SERIES_MAX`, before all those that speak now, and says how
  many it leaves out.
- The same thing has the same colour in every chart, and in reports: serving is blue, the guest and what it lends are
  orange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Literal

from rose.dashboard.names import of_figure
from rose.observer.measures import SeriesKey, slo_s

SERIES_MAX = 12
_SERVING, _GUEST = "blue", "orange"
_MORE_COLOURS = ("green", "sky", "purple", "vermilion", "grey", "yellow")

Unit = Literal["ms", "%", "tokens/s", ""]


@dataclass(frozen=True, slots=True)
class Line:
    """One series. `series` is its id; `style` says how it is drawn, an area being one on top of those before it."""

    series: str
    label: str
    colour: str
    style: Literal["line", "faint", "steps", "area"] = "line"


@dataclass(frozen=True, slots=True)
class Limit:
    """A line across the chart, in the unit of its values."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """`unit` "ms" is of values in seconds, "%" of shares. `top` is where the axis ends whatever the values are."""

    chart_id: str
    title: str
    says: str
    unit: Unit
    lines: list[Line]
    limits: list[Limit] = field(default_factory=list)
    top: float | None = None
    left_out: int = 0


def series_id(key: SeriesKey) -> str:
    """What a series is called between the server and the page."""
    return "|".join((key.source.service, key.source.target, key.figure, key.label))


def charts(known: Iterable[SeriesKey], latest: Mapping[SeriesKey, float], names: Mapping[str, str]) -> list[Chart]:
    """Of all series that are in memory; `latest` says what the bounds are now."""
    series = dict.fromkeys(known, 0.0)
    made = [
        _latency(series, latest, names, "ttft", "Time to the first token"),
        _latency(series, latest, names, "tpot", "Time per token after it"),
        _shares(series, names, "compute", "Compute", "Share of the last second in which each computed."),
        _shares(series, names, "kv", "KV cache", "Share of its own KV blocks that each uses."),
        _tokens(series, names),
        _success(series, names),
        _versions(series, names),
        _gate(series, names),
    ]
    speaking = {series_id(key) for key in latest}
    return [_bounded(chart, speaking) for chart in made if chart.lines]


def _latency(
    series: Mapping[SeriesKey, float],
    latest: Mapping[SeriesKey, float],
    names: Mapping[str, str],
    what: str,
    title: str,
) -> Chart:
    found = of_figure(series, f"{what} p50", f"{what} p99")
    several = len({key.source for key in found}) > 1
    lines = []
    for number, key in enumerate(found):
        fraction = key.figure.removeprefix(f"{what} ")
        label = f"{_whose(key, names)} {fraction}" if several else fraction
        colour = _MORE_COLOURS[number // 2 % len(_MORE_COLOURS)] if several else _SERVING
        lines.append(Line(series_id(key), label, colour, "line" if fraction == "p99" else "faint"))
    bound = slo_s(latest, what)
    limits = [] if bound is None else [Limit(bound, "SLO")]
    says = "What the users of serving see, over the last 15 s."
    return Chart(what, f"{title}, {what.upper()}", says, "ms", lines, limits)


def _shares(series: Mapping[SeriesKey, float], names: Mapping[str, str], figure: str, title: str, says: str) -> Chart:
    found = of_figure(series, figure)
    lines = _lines(found, names, {"serving": _SERVING, "guest": _GUEST})
    return Chart(figure, f"{title}: serving and guest", says, "%", lines, top=1.0)


def _tokens(series: Mapping[SeriesKey, float], names: Mapping[str, str]) -> Chart:
    """Of engines that roll out: those of a run, which has a ledger, and guests."""
    runs = {key.source.service for key in of_figure(series, "generated")}
    lines, more = [], cycle(_MORE_COLOURS)
    for key in of_figure(series, "guest tokens", "engine tokens"):
        if key.figure == "guest tokens":
            lines.append(Line(series_id(key), f"{_whose(key, names)}, lent", _GUEST, "area"))
        elif key.source.service in runs:
            lines.append(Line(series_id(key), f"{key.source.target}, dedicated", next(more), "area"))
    lines.sort(key=lambda line: line.colour == _GUEST)
    says = "Tokens that each rollout engine sampled per second, on top of one another, over the last 15 s."
    return Chart("tokens", "Rollout", says, "tokens/s", lines)


def _success(series: Mapping[SeriesKey, float], names: Mapping[str, str]) -> Chart:
    found = of_figure(series, "success")
    lines = _lines(found, names, {"train": "blue", "evaluation": "vermilion"}, "steps")
    return Chart("success", "Success", "Share of episodes that reach their goal.", "%", lines, top=1.0)


def _versions(series: Mapping[SeriesKey, float], names: Mapping[str, str]) -> Chart:
    found = of_figure(series, "version", "guest version")
    guests = {key: _whose(key, names) for key in found if not key.label}
    lines, more = [], cycle(_MORE_COLOURS)
    for key in found:
        colour = _GUEST if key in guests else next(more)
        label = guests.get(key) or _labelled(key, found, names)
        lines.append(Line(series_id(key), label, colour, "steps"))
    return Chart("versions", "Weight versions", "Which version each engine samples with.", "", lines)


def _gate(series: Mapping[SeriesKey, float], names: Mapping[str, str]) -> Chart:
    lines = _lines(of_figure(series, "gate"), names, {"": _GUEST})
    says = "Share of the time in which the guest was let in beside serving."
    return Chart("gate", "Gate of the guest", says, "%", lines, top=1.0)


def _lines(
    found: Mapping[SeriesKey, float],
    names: Mapping[str, str],
    colours: Mapping[str, str],
    style: Literal["line", "steps"] = "line",
) -> list[Line]:
    """One for each; with one source, the colours are those of the labels."""
    several = len({key.source for key in found}) > 1
    lines = []
    for number, key in enumerate(found):
        colour = _MORE_COLOURS[number % len(_MORE_COLOURS)] if several else colours.get(key.label, "green")
        lines.append(Line(series_id(key), _labelled(key, found, names), colour, style))
    return lines


def _labelled(key: SeriesKey, found: Iterable[SeriesKey], names: Mapping[str, str]) -> str:
    """Its label, and whose it is where that is not clear."""
    several = len({one.source for one in found}) > 1
    return " ".join(filter(None, (_whose(key, names) if several or not key.label else "", key.label)))


def _whose(key: SeriesKey, names: Mapping[str, str]) -> str:
    return " ".join(filter(None, (names.get(key.source.service, key.source.service), key.source.target)))


def _bounded(chart: Chart, speaking: Collection[str]) -> Chart:
    left_out = max(0, len(chart.lines) - SERIES_MAX)
    if not left_out:
        return chart
    drawn = sorted(chart.lines, key=lambda line: line.series not in speaking)[:SERIES_MAX]
    return replace(chart, lines=[line for line in chart.lines if line in drawn], left_out=left_out)
