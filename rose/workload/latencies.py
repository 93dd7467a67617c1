"""What users of the serving engine see: percentiles, an SLO and whether it is kept.

Invariants
- Pure, and of client-side records only: nothing here asks the engine.
- TTFT and TPOT are of completed requests. Attainment is of every request that judges the engine: one that was refused,
  broken, timed out or never sent for the cap has missed the SLO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rose.errors import ConfigError
from rose.slo import Slo
from rose.workload.load_record import LoadRecord, Outcome

# ROSE's margins over the p99 of serving alone (arXiv 2605.06534).
TTFT_FACTOR = 1.6
TPOT_FACTOR = 1.27


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `count` values, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """What a set of requests saw, in seconds; None where no request has such a figure.

    `gaps` are between successive arrivals of tokens. `lag` is the client's own, of every request that was sent.
    """

    outcomes: Mapping[Outcome, int]
    tokens: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    gaps: Percentiles | None
    lag: Percentiles | None

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of `requests` kept the SLO: both bounds, and each alone."""

    requests: int
    met: int
    ttft_met: int
    tpot_met: int

    @property
    def fraction(self) -> float | None:
        """None if there was no request to judge by."""
        return self.met / self.requests if self.requests else None


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics (type 7 of Hyndman and Fan 1996) of at least one value."""
    at = fraction * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Of those that are not None; None if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    p50, p90, p95, p99 = (quantile(ordered, fraction) for fraction in (0.5, 0.9, 0.95, 0.99))
    return Percentiles(len(ordered), sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def summarised(records: Iterable[LoadRecord]) -> LatencySummary:
    records = list(records)
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    return LatencySummary(
        outcomes=Counter(record.outcome for record in records),
        tokens=sum(record.tokens for record in records),
        ttft=percentiles(record.ttft_s for record in completed),
        tpot=percentiles(record.tpot_s for record in completed),
        gaps=percentiles(gap for record in completed for gap in record.gaps_s),
        lag=percentiles(record.lag_s for record in records),
    )


def attained(records: Iterable[LoadRecord], slo: Slo) -> Attainment:
    judged = [record for record in records if record.judges_engine]
    return Attainment(
        requests=len(judged),
        met=sum(ttft_met(record, slo) and tpot_met(record, slo) for record in judged),
        ttft_met=sum(ttft_met(record, slo) for record in judged),
        tpot_met=sum(tpot_met(record, slo) for record in judged),
    )


def ttft_met(record: LoadRecord, slo: Slo) -> bool:
    completed = record.outcome is Outcome.COMPLETED
    return completed and record.ttft_s is not None and record.ttft_s <= slo.ttft_s


def tpot_met(record: LoadRecord, slo: Slo) -> bool:
    """A completed answer of a single token has no time per token, and keeps the bound."""
    return record.outcome is Outcome.COMPLETED and (record.tpot_s is None or record.tpot_s <= slo.tpot_s)


def slo_from(alone: LatencySummary, ttft_factor: float = TTFT_FACTOR, tpot_factor: float = TPOT_FACTOR) -> Slo:
    """The SLO that serving alone sets: its own p99 with a margin.

    Raises ConfigError if alone completed too little to have both figures.
    """
    if alone.ttft is None or alone.tpot is None:
        raise ConfigError(
            f"no SLO from {alone.requests} requests of serving alone, of which none completed with two tokens",
            to_do="let serving alone answer some requests first",
        )
    return Slo(alone.ttft.p99 * ttft_factor, alone.tpot.p99 * tpot_factor)
