"""What a phase has shown, in figures. Pure.

Invariants
- A ratio is of two phases of the same round: the same requests, at the same times, some minutes apart.
- *Reclaim* is counted for each request that found the serving engine idle: how long after it was sent the guest still
  planned a step without knowing of it, or 0. What is then still computed is one step, which the figure leaves out.
- A request that the client itself sent late says nothing of that: its time of sending is no better known than so.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.coserving_phases import ALONE, NAIVE, OURS
from bench.result import Run
from rose.slo import Slo
from rose.workload.latencies import attained, percentiles, summarised
from rose.workload.load_record import LoadRecord
from rose_executor.step_log import Plan, SeenStep

IDLE_S = 0.05
"""For so long nothing may have been on its way for a request to be called a burst's first."""
CLIENT_LATE_S = 0.01


@dataclass(frozen=True, slots=True)
class Shown:
    """One phase of one round. `began_at_s` is second 0 of its records; `arrivals` were seen before it began."""

    records: Sequence[LoadRecord]
    began_at_s: float
    seconds: float
    guest_tokens: int = 0
    arrivals: int = 0
    steps: Sequence[SeenStep] = ()
    more: Mapping[str, float] = field(default_factory=dict)


def round_figures(shown: Mapping[str, Shown], slo: Slo) -> Run:
    """Of one round; those of ours have no name of a phase, the others end in it."""
    figures: dict[str, float | None] = {}
    for name, phase in shown.items():
        of_phase = phase_figures(phase, slo) | _compared(phase, shown)
        figures |= {f"{figure}_{name}": value for figure, value in of_phase.items()}
        if name == OURS.name:
            figures |= of_phase
    return figures


def pooled_figures(rounds: Sequence[Mapping[str, Shown]]) -> Run:
    """Ratios of the percentiles of all rounds' requests together."""
    names = rounds[0].keys()
    together = {name: [record for shown in rounds for record in shown[name].records] for name in names}
    alone = summarised(together[ALONE.name])
    figures: dict[str, float | None] = {}
    for name, records in together.items():
        summary = summarised(records)
        for what, ours, theirs in (("ttft", summary.ttft, alone.ttft), ("tpot", summary.tpot, alone.tpot)):
            ratio = None if ours is None or theirs is None else ours.p99 / theirs.p99
            figures[f"pooled_{what}_p99_ratio_{name}"] = ratio
            if name == OURS.name:
                figures[f"pooled_{what}_p99_ratio"] = ratio
        figures[f"pooled_requests_{name}"] = len(records)
    reclaims = [one for shown in rounds if OURS.name in shown for one in reclaim_excess_ms(shown[OURS.name])]
    found = percentiles(reclaims)
    figures["reclaim_excess_ms"] = None if found is None else found.p99
    figures["reclaims"] = len(reclaims)
    return figures


def phase_figures(phase: Shown, slo: Slo) -> dict[str, float | None]:
    summary = summarised(phase.records)
    figures: dict[str, float | None] = {
        "requests": summary.requests,
        "slo_attainment": attained(phase.records, slo).fraction,
        "guest_tok_s": phase.guest_tokens / phase.seconds,
        "guest_steps": len(phase.steps),
        "over_quota_steps": sum(plan.kv_blocks_used > plan.kv_blocks_quota for plan in _plans(phase)),
        **phase.more,
    }
    for what, found in (("ttft", summary.ttft), ("tpot", summary.tpot), ("lag", summary.lag)):
        figures |= {} if found is None else {f"{what}_p50_ms": 1e3 * found.p50, f"{what}_p99_ms": 1e3 * found.p99}
    return figures


def _compared(phase: Shown, shown: Mapping[str, Shown]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    if ALONE.name in shown:
        ours, alone = summarised(phase.records), summarised(shown[ALONE.name].records)
        for what, one, other in (("ttft", ours.ttft, alone.ttft), ("tpot", ours.tpot, alone.tpot)):
            if one is not None and other is not None:
                figures[f"{what}_p99_ratio"] = one.p99 / other.p99
                figures[f"{what}_p50_ratio"] = one.p50 / other.p50
    if NAIVE.name in shown and shown[NAIVE.name].guest_tokens:
        naive = shown[NAIVE.name]
        figures["guest_tok_s_fraction"] = (phase.guest_tokens / phase.seconds) / (naive.guest_tokens / naive.seconds)
    return figures


def reclaim_excess_ms(phase: Shown) -> list[float]:
    """One figure for each request that found the engine idle and was answered: see the module."""
    answered = sorted((one for one in phase.records if one.sent_s is not None), key=lambda one: one.sent_s or 0.0)
    plans = _plans(phase)
    planned_at_s = [plan.at_s for plan in plans]
    busy_until_s, found = -math.inf, list[float]()
    for number, record in enumerate(answered, start=phase.arrivals + 1):
        assert record.sent_s is not None
        if record.sent_s >= busy_until_s + IDLE_S and record.sent_s - record.due_s < CLIENT_LATE_S:
            sent_at_s = phase.began_at_s + record.sent_s
            late_s = 0.0
            for plan in plans[bisect_right(planned_at_s, sent_at_s) :]:
                if plan.arrivals >= number:
                    break
                late_s = plan.at_s - sent_at_s
            found.append(1e3 * late_s)
        busy_until_s = max(busy_until_s, record.ended_s)
    return found


def _plans(phase: Shown) -> list[Plan]:
    return [step.plan for step in phase.steps if step.plan is not None]
