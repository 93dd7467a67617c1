"""Serving alone against shared, percentile by percentile, as bars towards the SLO."""

from __future__ import annotations

from dataclasses import dataclass

from rose.report.coserving import Serving

LEVELS = ("p50", "p95", "p99")
FULL_PERCENT = 96.0
"""Where the longest bar ends, so that it does not touch the edge."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One percentile, in ms; the `_bar`s and `slo_at` are percent of the width. None where it was not measured."""

    name: str
    level: str
    alone_ms: float | None
    shared_ms: float | None
    ratio: float | None
    slo_ms: float
    alone_bar: float
    shared_bar: float
    slo_at: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The share of requests that may miss the SLO (`allowed`), that did (`missed`), and how much of it that spent.

    `bar` is percent of the width of a gauge whose full width is the whole budget, or what was spent if that is more.
    """

    allowed: float
    missed: float
    spent: float
    bar: float
    allowed_at: float


def comparisons(serving: Serving) -> list[Comparison]:
    """TTFT, then TPOT; the bars of each of the two have one scale."""
    return [
        *_of(serving, "ttft", "Time to first token", serving.slo_ttft_ms),
        *_of(serving, "tpot", "Time per output token", serving.slo_tpot_ms),
    ]


def _of(serving: Serving, what: str, name: str, slo_ms: float) -> list[Comparison]:
    pairs: list[tuple[str, float | None, float | None]] = [
        (level, getattr(serving.alone, f"{what}_{level}_ms"), getattr(serving.shared, f"{what}_{level}_ms"))
        for level in LEVELS
    ]
    longest_ms = max(slo_ms, *(value for _, alone, shared in pairs for value in (alone, shared) if value is not None))

    def bar(value_ms: float | None) -> float:
        return FULL_PERCENT * (value_ms or 0.0) / longest_ms

    return [
        Comparison(
            name, level, alone, shared, serving.ratios[f"{what}_{level}"], slo_ms, bar(alone), bar(shared), bar(slo_ms)
        )
        for level, alone, shared in pairs
    ]


def budget(serving: Serving) -> Budget | None:
    """None if no request judged the SLO."""
    if serving.shared.slo_kept is None:
        return None
    allowed, missed = 1 - serving.objective, 1 - serving.shared.slo_kept
    whole = max(allowed, missed)
    return Budget(allowed, missed, missed / allowed, 100 * missed / whole, 100 * allowed / whole)
