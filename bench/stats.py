"""The few statistics that benches need: medians, spread, and an interval for a ratio."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rose.workload.latencies import quantile as of_ordered

MIN_PAIRS = 5


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics (type 7 of Hyndman and Fan 1996).

    Raises ValueError if there are no values or the fraction lies outside 0 and 1.
    """
    if not values or not 0 <= fraction <= 1:
        raise ValueError(f"quantile {fraction} of {len(values)} values")
    return of_ordered(sorted(values), fraction)


def iqr(values: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for a single value."""
    return quantile(values, 0.75) - quantile(values, 0.25)


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """Median ratio and the ends of its interval; a difference is claimed only if the interval excludes 1."""

    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        return self.low > 1 or self.high < 1


def paired_ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> RatioInterval:
    """Median of `ours[i] / theirs[i]` with its percentile bootstrap interval (Efron 1979), pairs drawn whole.

    The i-th runs of both sides were made side by side, so what slows the machine down for a while cancels.
    The same seed gives the same interval. Raises ValueError unless both have the same length, at least MIN_PAIRS
    (from fewer no 95 % interval of a median can be had), and all values are above 0.
    """
    if len(ours) != len(theirs) or len(ours) < MIN_PAIRS:
        raise ValueError(f"{len(ours)} runs against {len(theirs)}: not at least {MIN_PAIRS} pairs")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs values above 0")
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    source = random.Random(seed)
    medians = [median(source.choices(ratios, k=len(ratios))) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    return RatioInterval(median(ratios), quantile(medians, tail), quantile(medians, 1 - tail))
