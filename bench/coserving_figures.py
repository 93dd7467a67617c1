"""What a phase has shown, in figures. Pure.

Invariants
- A ratio is of two phases of the same rounds: the same requests, at the same times, some minutes apart.
- The figures of the bench are of all rounds together. A round alone has a few dozen requests where its part of the
  trace is calm, so that its p99 is its slowest one; its ratios are called `round_*`, and no target is set for them.
- The interval of a ratio comes from rounds that are drawn anew, whole: a burst meets all of its requests.
- *Reclaim* is counted for each request that found the serving engine idle: how long after it was sent the guest still
  planned a step without knowing of it, or 0. What is then still computed is one step, which the figure leaves out.
- A request that the client itself sent late says nothing of that: its time of sending is no better known than so.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.coserving_phases import ALONE, NAIVE, OURS
from bench.result import Run
from bench.stats import quantile
from rose.slo import Slo
from rose.workload.latencies import attained, summarised
from rose.workload.load_record import LoadRecord, Outcome
from rose_executor.step_log import Plan, SeenStep

IDLE_S = 0.05
"""For so long nothing may have been on its way for a request to be called a burst's first."""
CLIENT_LATE_S = 0.01
_RESAMPLES = 1000


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
        ratios = _compared({name: [phase] for name, phase in shown.items()}, name)
        of_phase = phase_figures(phase, slo) | {f"round_{figure}": value for figure, value in ratios.items()}
        figures |= _named(of_phase, name)
    return figures


def all_figures(rounds: Sequence[Mapping[str, Shown]], slo: Slo) -> Run:
    """Of all rounds' requests and tokens together, with the 95 % interval of each ratio of latencies."""
    together = _together(rounds)
    drawn = [_together(some) for some in _drawn(rounds)]
    figures: dict[str, float | None] = {}
    for name, phases in together.items():
        records = [record for phase in phases for record in phase.records]
        of_phase = _compared(together, name)
        of_phase |= {"requests_together": len(records), "slo_attainment": attained(records, slo).fraction}
        for ratio in ("ttft_p99_ratio", "tpot_p99_ratio"):
            found = [one for some in drawn if (one := _compared(some, name).get(ratio)) is not None]
            if found:
                of_phase |= {f"{ratio}_low": quantile(found, 0.025), f"{ratio}_high": quantile(found, 0.975)}
        figures |= _named(of_phase, name)
    reclaims = [one for phase in together.get(OURS.name, ()) for one in reclaim_excess_ms(phase)]
    figures["reclaim_excess_ms"] = quantile(reclaims, 0.99) if reclaims else None
    figures["reclaims"] = len(reclaims)
    return figures


def _together(rounds: Sequence[Mapping[str, Shown]]) -> dict[str, list[Shown]]:
    return {name: [shown[name] for shown in rounds] for name in rounds[0]}


def _drawn(rounds: Sequence[Mapping[str, Shown]]) -> Iterator[list[Mapping[str, Shown]]]:
    """Resamples of a bootstrap (Efron 1979), of whole rounds."""
    source = random.Random(0)
    for _ in range(_RESAMPLES):
        yield source.choices(rounds, k=len(rounds))


def _named(of_phase: Mapping[str, float | None], name: str) -> dict[str, float | None]:
    named = {f"{figure}_{name}": value for figure, value in of_phase.items()}
    return {**named, **of_phase} if name == OURS.name else named


def phase_figures(phase: Shown, slo: Slo) -> dict[str, float | None]:
    summary = summarised(phase.records)
    figures: dict[str, float | None] = {
        "requests": summary.requests,
        "round_slo_attainment": attained(phase.records, slo).fraction,
        "guest_tok_s": phase.guest_tokens / phase.seconds,
        "guest_steps": len(phase.steps),
        "over_quota_steps": sum(plan.kv_blocks_used > plan.kv_blocks_quota for plan in _plans(phase)),
        **phase.more,
    }
    for what, found in (("ttft", summary.ttft), ("tpot", summary.tpot), ("lag", summary.lag)):
        figures |= {} if found is None else {f"{what}_p50_ms": 1e3 * found.p50, f"{what}_p99_ms": 1e3 * found.p99}
    return figures


def _compared(shown: Mapping[str, Sequence[Shown]], name: str) -> dict[str, float | None]:
    """A phase against serving alone, and against naive sharing, over all that each has shown."""
    figures: dict[str, float | None] = {}
    if ALONE.name in shown:
        ours, alone = _latencies(shown[name]), _latencies(shown[ALONE.name])
        for what in ours.keys() & alone.keys():
            figures[f"{what}_p99_ratio"] = quantile(ours[what], 0.99) / quantile(alone[what], 0.99)
            figures[f"{what}_p50_ratio"] = quantile(ours[what], 0.5) / quantile(alone[what], 0.5)
    naive_tok_s = _tok_s(shown.get(NAIVE.name, ()))
    if naive_tok_s:
        figures["guest_tok_s_fraction"] = _tok_s(shown[name]) / naive_tok_s
    return figures


def _latencies(phases: Sequence[Shown]) -> dict[str, list[float]]:
    """Of completed requests, as in `rose.workload.latencies`; what none has is left out."""
    completed = [one for phase in phases for one in phase.records if one.outcome is Outcome.COMPLETED]
    ttft = [one.ttft_s for one in completed if one.ttft_s is not None]
    tpot = [one.tpot_s for one in completed if one.tpot_s is not None]
    return {what: sorted(values) for what, values in (("ttft", ttft), ("tpot", tpot)) if values}


def _tok_s(phases: Sequence[Shown]) -> float:
    seconds = sum(phase.seconds for phase in phases)
    return sum(phase.guest_tokens for phase in phases) / seconds if seconds else 0.0


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
