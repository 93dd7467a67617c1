"""One round of `coserving`: every phase once, in an order drawn for it, all under the same part of the trace."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from bisect import bisect_left
from dataclasses import dataclass, field

from bench.coserving_figures import Shown
from bench.coserving_phases import Phase
from bench.coserving_rig import Rig
from bench.coserving_rollouts import Rollouts, Tally
from rose.demo.load import LoadPlan
from rose.workload.scaling import Scaling
from rose_executor.board import SERVING, BoardReader
from rose_executor.step_log import read_steps

TRACE = "azure_2023_code"
RATE_RPS = 3.0
KEEP_S = 25.0
WINDOW_S = 60.0
FIRST_S, APART_S = 300.0, 280.0
"""Where in the trace the first round's part begins, and how far the next ones are behind one another."""
PROMPT_SCALE, OUTPUT_SCALE = 1 / 16, 1 / 2
CONTEXT_TOKENS = 1024
TOKEN_IDS = "5:384"
_WARM_STEPS = 50
_WARM_S = 60.0
_SAMPLE_S = 0.05
_POLL_S = 0.05


def part_of_trace(index: int) -> LoadPlan:
    """The load of round `index`."""
    scaling = Scaling(
        window_s=WINDOW_S,
        start_s=FIRST_S + APART_S * index,
        rate_rps=RATE_RPS,
        keep_s=KEEP_S,
        prompt_scale=PROMPT_SCALE,
        output_scale=OUTPUT_SCALE,
        context_tokens=CONTEXT_TOKENS,
    )
    return LoadPlan(TRACE, scaling, TOKEN_IDS)


def in_order(phases: tuple[Phase, ...], index: int) -> list[Phase]:
    return random.Random(index).sample(phases, len(phases))


@dataclass(slots=True)
class Counters:
    """What is read again and again while a phase lasts: moments of the monotonic clock, and totals at these."""

    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)

    def between(self, totals: list[float] | list[int], since_s: float, until_s: float) -> float:
        """By how much a total grew between two moments that were covered."""
        first = max(0, bisect_left(self.at_s, since_s) - 1)
        last = min(len(self.at_s) - 1, bisect_left(self.at_s, until_s))
        return totals[last] - totals[first]


async def shown(rig: Rig, phase: Phase, index: int) -> Shown:
    """Run a phase. Raises BenchFailed or RoseError if something of it does not run."""
    rig.arrange(phase)
    counters, tally = Counters(), Tally()
    skipped = len(read_steps(rig.step_log))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(asyncio.create_task(_count(rig, counters)).cancel)
        if phase.guest:
            rollouts = Rollouts(rig.guest.base_url, rig.guest.page, rig.waits)
            tally = await stack.enter_async_context(rollouts.during(index))
            await _warm(rig, skipped)
        arrivals, before = rig.serving_state().arrivals, rig.costs()
        replay = await rig.replay(part_of_trace(index))
        assert replay.end is not None
        began_at_s = float(replay.end["began_monotonic_s"])
        until_s = began_at_s + float(replay.head["length_s"])
        # The replay ends with its last answer; what is silent behind that is part of the trace as well.
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        costs, memory = rig.costs().since(before), rig.memory()
    busy_s = counters.between(counters.busy_s, began_at_s, until_s)
    more = {
        "serving_busy": busy_s / (until_s - began_at_s),
        "probe_percent": 100 * costs.probe_s / busy_s,
        "tokens_lost": float(tally.lost_tokens),
        "moved": float(tally.moved),
        **memory,
    }
    if costs.step_s:
        more["guest_overhead_percent"] = 100 * costs.ours_s / costs.step_s
    return Shown(
        records=replay.records,
        began_at_s=began_at_s,
        seconds=until_s - began_at_s,
        guest_tokens=round(counters.between(counters.tokens, began_at_s, until_s)),
        arrivals=arrivals,
        steps=[step for step in read_steps(rig.step_log, skipped) if step.plan is not None],
        more=more,
    )


async def _count(rig: Rig, counters: Counters) -> None:
    reader = BoardReader(rig.folder / "board")
    try:
        while True:
            now_s = time.monotonic()
            serving = reader.read(SERVING, now_s).state
            if serving is not None:
                counters.at_s.append(now_s)
                counters.tokens.append(rig.guest.page.total())
                counters.busy_s.append(serving.busy_s)
            await asyncio.sleep(_SAMPLE_S)
    finally:
        reader.close()


async def _warm(rig: Rig, skipped: int) -> None:
    """Until the guest has taken some steps: what it begins with is its own business, not the phase's."""

    async def until() -> None:
        while len(read_steps(rig.step_log, skipped)) < _WARM_STEPS:
            await asyncio.sleep(_POLL_S)

    await rig.waits.within(until(), "first steps", "guest", _WARM_S, boundary="engine")
