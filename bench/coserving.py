"""The co-serving executor: what a guest costs the serving engine that it shares a core with, and what it gets done.

One run is one round: all phases of `coserving_phases`, interleaved, under the same part of a real trace with its
bursts. Both engines stay for all rounds. The SLO is ROSE's: 1.6 times the p99 of serving alone for the first token,
1.27 times for the tokens after it, measured before the first round under the parts of all rounds.

Top-level figures are those of *ours*. Ratios, attainment and `reclaim_excess_ms` are of all rounds' requests together
and stand in the last run alone; what a round by itself would say is called `round_*`. Beside the file a picture of each
figure that has a target is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from bench.coserving_figures import Shown, all_figures, round_figures
from bench.coserving_pages import pages_figures
from bench.coserving_phases import ALONE, NAIVE, PHASES, Phase
from bench.coserving_plots import draw
from bench.coserving_rig import Rig, open_rig
from bench.coserving_round import in_order, part_of_trace, shown
from bench.registry import Bench, BenchFailed
from bench.result import Run, Target
from rose.slo import Slo
from rose.workload.latencies import slo_from, summarised


class Session:
    """Both engines and what they have shown, over all rounds."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._rounds: list[Mapping[str, Shown]] = []
        self._runs: list[Run] = []
        self._rig: Rig | None = None

    def round(self, arguments: Namespace, index: int) -> Run:
        """Raises BenchFailed or RoseError, and nothing of the session is left then."""
        try:
            run = self._runner.run(self._round(chosen(arguments.only), index, arguments.runs))
            if index == 0:
                run = {**run, **pages_figures()}
            if index == arguments.runs - 1:
                run = {**run, **all_figures(self._rounds, self._slo)}
            self._runs.append(run)
            if index == arguments.runs - 1:
                draw(self._runs, arguments.json)
                self.close()
            return run
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    async def _round(self, phases: tuple[Phase, ...], index: int, rounds: int) -> Run:
        if self._rig is None:
            self._rig = await self._stack.enter_async_context(open_rig())
            self._rig.slo = await _calibrated(self._rig, rounds)
        found = {phase.name: await shown(self._rig, phase, index) for phase in in_order(phases, index)}
        self._rounds.append(found)
        slo = self._slo
        figures = round_figures(found, slo)
        return {**figures, "slo_ttft_ms": 1e3 * slo.ttft_s, "slo_tpot_ms": 1e3 * slo.tpot_s}

    @property
    def _slo(self) -> Slo:
        assert self._rig is not None
        assert self._rig.slo is not None
        return self._rig.slo


async def _calibrated(rig: Rig, rounds: int) -> Slo:
    """From serving alone."""
    rig.arrange(ALONE)
    records = []
    for index in range(rounds):
        records += (await rig.replay(part_of_trace(index))).records
    return slo_from(summarised(records))


def chosen(only: str) -> tuple[Phase, ...]:
    """All phases, or those that are named. Raises BenchFailed for a name that is none."""
    if not only:
        return PHASES
    names = only.split(",")
    unknown = set(names) - {phase.name for phase in PHASES}
    if unknown:
        raise BenchFailed(f"no phase {', '.join(sorted(unknown))}", expected=", ".join(phase.name for phase in PHASES))
    return tuple(phase for phase in PHASES if phase.name in names)


_session: list[Session] = []


def measure(arguments: Namespace, index: int) -> Run:
    if os.geteuid() != 0:
        raise BenchFailed("processes are put into control groups", to_do="run it as root")
    if index == 0:
        _session[:] = [Session()]
    return _session[0].round(arguments, index)


def add_arguments(parser: ArgumentParser) -> None:
    names = ", ".join(phase.name for phase in PHASES)
    parser.add_argument("--only", default="", metavar="PHASES", help=f"comma-separated, of: {names}")


def left_out(arguments: Namespace) -> dict[str, str]:
    names = {phase.name for phase in chosen(arguments.only)}
    left: dict[str, str] = {}
    if ALONE.name not in names:
        ratios = [f"{what}_p99_ratio{end}" for what in ("ttft", "tpot") for end in ("", "_low", "_high")]
        left |= dict.fromkeys(ratios, "--only leaves out alone")
    if NAIVE.name not in names:
        left["guest_tok_s_fraction"] = "--only leaves out naive"
    return left


BENCH = Bench(
    name="coserving",
    summary="the co-serving executor: serving beside a guest, in seven ways to share a core",
    headline=(
        *("ttft_p99_ratio", "tpot_p99_ratio", "guest_tok_s_fraction", "slo_attainment", "reclaim_excess_ms"),
        *("ttft_p99_ratio_low", "ttft_p99_ratio_high", "tpot_p99_ratio_low", "tpot_p99_ratio_high"),
        *("oscillations_per_min", "tokens_lost", "over_quota_steps", "pages_back_ms_per_gib"),
        *("guest_overhead_percent", "probe_percent"),
    ),
    targets=(
        Target("ttft_p99_ratio", "<=", 1.10),
        Target("tpot_p99_ratio", "<=", 1.10),
        Target("guest_tok_s_fraction", ">=", 0.85),
        Target("slo_attainment", ">=", 0.99),
        Target("reclaim_excess_ms", "<=", 5),
        Target("tokens_lost", "==", 0),
        Target("over_quota_steps", "==", 0),
        Target("pages_back_ms_per_gib", "<=", 150),
        Target("guest_overhead_percent", "<=", 2),
        Target("probe_percent", "<=", 1),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=5,
)
