"""Who ran what when, as lanes that are drawn without a script, in percent of the width.

Invariants
- All lanes lie over one stretch of time: the run, and what was watched before it.
- An engine's lane is as high as the engine was busy; a phase of the run is there or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rose.report.binned import Bins, bins_of
from rose.report.coserving import Series, Sharing
from rose.report.model import Phase, RunReport
from rose.report.serving_charts import colours
from rose.report.words import percent, seconds

PHASE_COLOURS = {"rollout": "blue", "train": "orange", "publish": "green", "apply": "purple", "evaluation": "sky"}
COSERVED_PHASE_COLOUR = "grey"
"""Beside engines, the colours tell the engines apart, and the phases are left to their names."""
THINNEST_PERCENT = 0.15
"""A stretch of the timeline is never drawn thinner than this, or a short publish would vanish."""


@dataclass(frozen=True, slots=True)
class Lane:
    """`stretches` are (left, width) in percent; `outline`, if there is one, is an SVG path in a box of 1000 by 100."""

    name: str
    colour: str
    total: str
    stretches: list[tuple[float, float]]
    outline: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """`ticks` are (percent, seconds) of round times; `run_from` is where the run began, in percent."""

    lanes: list[Lane]
    ticks: list[tuple[float, float]]
    run_from: float


def timeline(report: RunReport) -> Timeline:
    """Engines first, then the run's phases; without lanes if nothing was recorded."""
    if report.sharing is None:
        end_s = max(1e-9, report.wall_s, *(phase.end_s for phase in report.phases))
        return Timeline(phase_lanes(report.phases, 0.0, end_s), ticks(0.0, end_s), 0.0)
    bins = bins_of(report.sharing, max(report.wall_s, *(phase.end_s for phase in report.phases), 0.0))
    lanes = [
        *engine_lanes(report.sharing, bins, colours(report)),
        *phase_lanes(report.phases, bins.start_s, bins.end_s, COSERVED_PHASE_COLOUR),
    ]
    return Timeline(lanes, ticks(bins.start_s, bins.end_s), _at(0.0, bins.start_s, bins.end_s))


def phase_lanes(phases: Sequence[Phase], start_s: float, end_s: float, colour: str | None = None) -> list[Lane]:
    """One lane per phase name, in order of first start."""
    found: dict[str, list[Phase]] = {}
    for phase in sorted(phases, key=lambda phase: phase.start_s):
        found.setdefault(phase.name, []).append(phase)
    return [
        Lane(
            name,
            colour or PHASE_COLOURS.get(name, "grey"),
            seconds(sum(phase.end_s - phase.start_s for phase in group)),
            [
                (
                    _at(phase.start_s, start_s, end_s),
                    max(THINNEST_PERCENT, 100 * (phase.end_s - phase.start_s) / (end_s - start_s)),
                )
                for phase in group
            ],
        )
        for name, group in found.items()
    ]


def engine_lanes(sharing: Sharing, bins: Bins, colour_of: dict[str, str]) -> list[Lane]:
    """Shares of compute where they are known; of another engine, its tokens each second against its own best."""
    compute = sharing.of("compute")
    lanes = [_engine_lane(series, bins, colour_of, 1.0, "busy") for series in compute.values()]
    for who, series in sharing.of("rollout_tokens_s").items():
        guest_has_lane = "guest" in compute and colour_of.get(who) == colour_of["guest"]
        if who not in compute and not guest_has_lane:
            best = max((value for value in series.values if value is not None), default=0.0)
            lanes.append(_engine_lane(series, bins, colour_of, best, "of its best"))
    return lanes


def _engine_lane(series: Series, bins: Bins, colour_of: dict[str, str], whole: float, of_what: str) -> Lane:
    shares = [None if value is None or not whole else value / whole for value in bins.means(series)]
    known = [share for share in shares if share is not None]
    total = f"{percent(sum(known) / len(known))} {of_what}" if known else "–"
    return Lane(series.who, colour_of.get(series.who, "grey"), total, [], _outline(shares))


def _outline(shares: Sequence[float | None]) -> str:
    """Steps as wide as a bin and as high as the share, resting on the floor; nothing where nothing is known."""
    width = 1000 / max(1, len(shares))
    heights = [0 if share is None else round(100 * min(1.0, max(0.0, share))) for share in shares]
    steps, before = [], 0
    for number, height in enumerate(heights):
        if height != before:
            steps.append(f"H{number * width:.1f}V{100 - height}")
            before = height
    return f"M0 100{''.join(steps)}H1000V100Z" if steps else ""


def ticks(start_s: float, end_s: float) -> list[tuple[float, float]]:
    """About five of them."""
    whole = end_s - start_s
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
    step = next((step for step in steps if whole / step <= 6), 3600 * math.ceil(whole / 3600 / 6))
    first = math.ceil(start_s / step) * step
    return [(_at(at, start_s, end_s), at) for at in range(first, int(end_s) + 1, step)]


def _at(moment_s: float, start_s: float, end_s: float) -> float:
    return 100 * (moment_s - start_s) / (end_s - start_s)
