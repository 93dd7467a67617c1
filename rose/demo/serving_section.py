"""The report's section on serving: the same load alone and shared, as its users saw it. Pure.

Invariants
- Shared counts what began and ended while the run trained. Before and after that the guest may have been idle, and
  would flatter it; or its start may have cost serving something, so what users saw then stands beside it.
- A request that was cut by the end of its replay says nothing, and is in no figure but the count of outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rose.report.coserving import LatencyFigures, Serving
from rose.report.model import RunReport
from rose.slo import Slo
from rose.workload.latencies import TPOT_FACTOR, TTFT_FACTOR, Percentiles, attained, summarised
from rose.workload.load_record import LoadRecord
from rose.workload.record_file import Replay
from rose.workload.trace import Trace

_TRAINING = ("rollout", "train", "publish", "apply")


@dataclass(frozen=True, slots=True)
class Window:
    """From one moment to another, in `time.time()` seconds."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return max(0.0, self.end_s - self.begin_s)


def training_window(report: RunReport, began_at_s: float) -> Window:
    """From the first training phase to the end of the last; empty if there was none.

    `began_at_s` is when the run began, which its phases count from.
    """
    phases = [phase for phase in report.phases if phase.name in _TRAINING]
    if not phases:
        return Window(began_at_s, began_at_s)
    return Window(
        began_at_s + min(phase.start_s for phase in phases), began_at_s + max(phase.end_s for phase in phases)
    )


def serving_section(trace: Trace, slo: Slo, alone: Replay, replays: Sequence[Replay], window: Window) -> Serving:
    """Both stretches of load beside each other."""
    played = [(replay, within(replay, window)) for replay in replays]
    outside = [record for replay, inside in played for record in _others(replay.records, inside)]
    return Serving(
        trace=trace.name,
        attribution=trace.attribution,
        history=trace.history,
        rate_rps=trace.rate_rps,
        replays=sum(bool(records) for _, records in played),
        slo_ttft_ms=1e3 * slo.ttft_s,
        slo_tpot_ms=1e3 * slo.tpot_s,
        slo_ttft_factor=TTFT_FACTOR,
        slo_tpot_factor=TPOT_FACTOR,
        alone=figures(alone.records, slo, trace.length_s),
        shared=figures([record for _, records in played for record in records], slo, window.length_s),
        around=figures(outside, slo, max(0.0, _length_s(replays) - window.length_s)),
    )


def within(replay: Replay, window: Window) -> list[LoadRecord]:
    """Its records that were due and ended inside the window."""
    began_s = replay.head.get("began_at")
    if not isinstance(began_s, int | float):
        return []
    return [
        record
        for record in replay.records
        if window.begin_s <= began_s + record.due_s and began_s + record.ended_s <= window.end_s
    ]


def _others(records: Iterable[LoadRecord], inside: Iterable[LoadRecord]) -> list[LoadRecord]:
    """All of one replay that are not `inside`."""
    counted = {record.index for record in inside}
    return [record for record in records if record.index not in counted]


def _length_s(replays: Sequence[Replay]) -> float:
    """From the first request of the first to the end of the last request of the last."""
    begun = [(replay, float(replay.head["began_at"])) for replay in replays if replay.records and replay.head]
    if not begun:
        return 0.0
    ends = [began_s + max(record.ended_s for record in replay.records) for replay, began_s in begun]
    return max(ends) - min(began_s for _, began_s in begun)


def figures(records: Iterable[LoadRecord], slo: Slo, duration_s: float) -> LatencyFigures:
    """What the users of these requests saw in a stretch of `duration_s`."""
    records = list(records)
    summary, kept = summarised(records), attained(records, slo)

    def share(met: int) -> float | None:
        return met / kept.requests if kept.requests else None

    return LatencyFigures(
        requests=summary.requests,
        outcomes={str(outcome): count for outcome, count in summary.outcomes.items()},
        tokens=summary.tokens,
        duration_s=duration_s,
        **_milliseconds("ttft", summary.ttft),
        **_milliseconds("tpot", summary.tpot),
        slo_kept=kept.fraction,
        ttft_kept=share(kept.ttft_met),
        tpot_kept=share(kept.tpot_met),
        client_lag_p99_ms=None if summary.lag is None else 1e3 * summary.lag.p99,
    )


def _milliseconds(what: str, found: Percentiles | None) -> dict[str, float | None]:
    levels = {50: None, 95: None, 99: None} if found is None else {50: found.p50, 95: found.p95, 99: found.p99}
    return {f"{what}_p{level}_ms": None if at is None else 1e3 * at for level, at in levels.items()}
