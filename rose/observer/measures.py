"""The figures of every scraped service at one moment, made of what was scraped before. Pure.

Invariants
- What has not been scraped for `FRESH_S` says nothing: its series have a gap there, never an old value.
- Attainment judges every request that ended: one without a latency, since it was refused or broke, has missed the SLO.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rose.observer.buckets import quantile, share_below
from rose.observer.exposition import Sample, Samples
from rose.observer.figures import COUNTED, FIGURES, REQUESTS, TPOT, TTFT, WINDOW_S, Latest, Rate
from rose.observer.growth import Growth

FRESH_S = 4.0
ATTAINED_OVER_S = 300.0
_LOOKS_MAX = 400
_CUT = "cut"
"""Ended by the end of the replay itself, which says nothing about the engine."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is scraped: a service by its id, and which of its addresses; its own is ""."""

    service: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """One series: a figure of `FIGURES`, or "kept", of one source; `label` tells apart those of one name."""

    source: Source
    figure: str
    label: str = ""


class _Seen:
    def __init__(self) -> None:
        self.at_s = -math.inf
        self.samples: Samples = {}
        self.growth = Growth(ATTAINED_OVER_S, _LOOKS_MAX)


class Measures:
    """All sources. `at_s` are seconds that never fall."""

    def __init__(self) -> None:
        self._seen: dict[Source, _Seen] = {}

    def scraped(self, source: Source, at_s: float, samples: Samples) -> None:
        """A source has answered."""
        seen = self._seen.setdefault(source, _Seen())
        seen.at_s, seen.samples = at_s, samples
        seen.growth.look(at_s, {name: found for name, found in samples.items() if name in COUNTED})

    def keep(self, services: Collection[str]) -> None:
        """Forget the sources of all others. One that has another address now goes on with what it had counted."""
        self._seen = {source: seen for source, seen in self._seen.items() if source.service in services}

    def at(self, now_s: float) -> dict[SeriesKey, float]:
        """Every figure that can be told now."""
        fresh = {source: seen for source, seen in self._seen.items() if now_s - seen.at_s <= FRESH_S}
        told = {
            SeriesKey(source, name, label): value
            for source, seen in fresh.items()
            for name, label, value in _figures(seen)
            if math.isfinite(value)
        }
        for what, metric in (("ttft", TTFT), ("tpot", TPOT)):
            limit = slo_s(told, what)
            if limit is None:
                continue
            for source, seen in fresh.items():
                kept = _kept(seen.growth, metric, limit)
                if kept is not None:
                    told[SeriesKey(source, "kept", what)] = kept
        return told


def slo_s(latest: Mapping[SeriesKey, float], what: str) -> float | None:
    """The bound, "ttft" or "tpot" in seconds, on which all executors agree; None if there is none, or several."""
    bounds = {value for key, value in latest.items() if key.figure == "slo" and key.label == what}
    return bounds.pop() if len(bounds) == 1 else None


def _figures(seen: _Seen) -> Iterator[tuple[str, str, float]]:
    """(figure, label, value)"""
    for figure in FIGURES:
        if isinstance(figure, Latest):
            for label, value in _summed(figure.by, seen.samples.get(figure.metric, ())).items():
                yield figure.name, label, value
        elif isinstance(figure, Rate):
            seconds, grown = seen.growth.over(WINDOW_S, figure.metric)
            if seconds > 0:
                for label, value in _summed(figure.by, grown).items():
                    yield figure.name, label, value / seconds
        else:
            found = quantile(_histogram(seen.growth, figure.metric, WINDOW_S), figure.fraction)
            if found is not None:
                yield figure.name, "", found


def _summed(by: str, samples: Sequence[Sample]) -> Mapping[str, float]:
    summed: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        summed[sample.labels.get(by, "") if by else ""] += sample.value
    return summed


def _histogram(growth: Growth, metric: str, seconds: float) -> dict[float, float]:
    """Upper bound → how many values at or below it came within the last `seconds`."""
    _, grown = growth.over(seconds, f"{metric}_bucket")
    found: defaultdict[float, float] = defaultdict(float)
    for sample in grown:
        try:
            found[float(sample.labels["le"])] += sample.value
        except (KeyError, ValueError):
            return {}
    return dict(sorted(found.items()))


def _kept(growth: Growth, metric: str, limit_s: float) -> float | None:
    """Which share of the requests kept a bound; None if none ended. An answer of a single token has no TPOT, and keeps
    the bound on it.
    """
    _, requests = growth.over(ATTAINED_OVER_S, REQUESTS)
    ended = _summed("outcome", requests)
    judged = sum(count for outcome, count in ended.items() if outcome != _CUT)
    if judged <= 0:
        return None
    histogram = _histogram(growth, metric, ATTAINED_OVER_S)
    below = share_below(histogram, limit_s)
    above = 0.0 if below is None else (1.0 - below) * max(histogram.values())
    return max(0.0, ended.get("completed", 0.0) - above) / judged
