"""The demo as a whole: serving alone, then the same load while the serving engine lends what it leaves.

Invariants
- The director computes nothing and decides little: it starts, watches, follows the run, and reports.
- Whatever ends it (done, failed, Ctrl-C, SIGKILL), nothing that it started is left.
- The executor outlives the run: the run's last question is how many tokens the guest has generated.
- Without serving or run the demo is over; it survives executor and dashboard, and a few deaths of its load clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rose.config import Job
from rose.demo.board_watch import make_board, watch_board
from rose.demo.child import DemoChild, Program, start_child
from rose.demo.cores import Placing, split_cores
from rose.demo.kept import KeptChild
from rose.demo.lending import executor_program
from rose.demo.load import LoadClients, LoadPlan
from rose.demo.over_time import GUEST, Watched, sharing_section
from rose.demo.pace import request_seconds
from rose.demo.plan import DemoPlan, paced, planned_job, planned_load
from rose.demo.run_end import REPORT, failure_of
from rose.demo.service_page import fact_of, page_of
from rose.demo.serving_engine import ServingEngine, ServingSettings, free_port, start_serving
from rose.demo.serving_model import make_serving_model
from rose.demo.serving_section import serving_section, training_window
from rose.demo.under_watch import under_watch
from rose.errors import ClusterError, RoseError
from rose.logs import logger, open_log
from rose.observer.observer import observe
from rose.processes import become_subreaper, end_descendants, two_stage_stop
from rose.report.model import RunReport
from rose.report.words import duration, serving_words
from rose.report.write import write_report
from rose.runs import Run, open_service, runtime_root
from rose.slo import Slo
from rose.status import Page, StatusBoard
from rose.stop import Stop
from rose.waits import WaitBoard
from rose.workload.latencies import LatencySummary, slo_from, summarised
from rose.workload.record_file import Replay
from rose.workload.trace import Trace

log = logger("director")

_END_GRACE_S = 5.0
_RUN_END_S = 90.0
_PACE_S = 120.0
_PAGE_S = 120.0
_LEND_S = 600.0
_DASHBOARD_S = 60.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What came of it: the run's exit status (never 0 without a report) and folder, when it began, what was replayed
    and what became of that."""

    status: int
    output: Path
    began_at_s: float
    trace: Trace
    slo: Slo
    alone: Replay
    replays: list[Replay]


def run_demo(plan: DemoPlan, say: Callable[[str], None]) -> int:
    """Run it; the run's exit status. Main thread only. `say` is given lines for the terminal while nobody draws there.

    Raises ConfigError for a wrong trace or job before anything starts, RoseError for what ended the demo,
    KeyboardInterrupt after Ctrl-C.
    """
    trace, job = planned_load(plan.load), planned_job(plan)
    cores = split_cores(os.sched_getaffinity(0))
    become_subreaper()
    waits, stop = WaitBoard(), Stop()
    with (
        open_service("director", job.run.out, waits, {}) as service,
        two_stage_stop(stop.ask, service.close),
        open_log(service.output / "log.jsonl"),
        contextlib.closing(Placing(cores, yields=plan.yields)) as placing,
        StatusBoard(service, waits) as board,
    ):
        os.sched_setaffinity(0, cores.others)
        director = Director(plan, trace, job, service, board, waits, placing, say)
        try:
            return asyncio.run(stop.cancels(director.run()))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            end_descendants(_END_GRACE_S)


class Director:
    """Runs one demo once."""

    def __init__(
        self,
        plan: DemoPlan,
        trace: Trace,
        job: Job,
        service: Run,
        board: StatusBoard,
        waits: WaitBoard,
        placing: Placing,
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._trace = trace
        self._job = job
        self._service = service
        self._board = board
        self._waits = waits
        self._placing = placing
        self._say = say
        self._watched = Watched()

    async def run(self) -> int:
        """The run's exit status. Raises RoseError if a part ends without which there is no demo."""
        began_s = time.monotonic()
        self._watched.pids[os.getpid()] = "director"
        self._say("a serving engine starts; it is asked alone for a minute before the run begins")
        shared = await under_watch(
            self._directed(), observe(runtime_root(), self._waits, self._watched.store, self._watched.seen)
        )
        self._report(shared)
        took = duration(time.monotonic() - began_s)
        self._say(f"  whole      {took}, serving alone included; the dashboard ends with it")
        return shared.status

    async def _directed(self) -> Shared:
        async with contextlib.AsyncExitStack() as stack:
            serving = await self._serve(stack)
            board = watch_board(self._service.runtime / "board", self._watched.board)
            return await under_watch(self._compare(stack, serving), serving.watch(), board)

    async def _serve(self, stack: contextlib.AsyncExitStack) -> ServingEngine:
        folder = self._service.runtime
        self._phase("serving engine starts")
        make_board(folder / "board")
        model = await asyncio.to_thread(make_serving_model, folder / "serving-model", self._plan.shape)
        settings = ServingSettings(
            model, folder, self._service.output / "serving.log", context_tokens=self._plan.shape.context_tokens
        )
        self._board.part("serving", "starting")
        serving = await start_serving(settings, self._placing, self._waits)
        stack.push_async_callback(serving.child.stop, _END_GRACE_S)
        self._board.part("serving", "healthy", serving.url)
        return serving

    async def _paced(self, url: str) -> tuple[LoadPlan, Trace]:
        """The load for this machine, and what it then is."""
        plan = self._plan
        asked = request_seconds(url, self._trace)
        request_s = await self._waits.within(asked, "pace", "serving", _PACE_S, boundary="engine")
        load = replace(plan.load, scaling=paced(plan.load.scaling, request_s, plan.share))
        log.info("pace", request_s=request_s, rate_rps=load.scaling.rate_rps)
        return load, await asyncio.to_thread(planned_load, load)

    async def _compare(self, stack: contextlib.AsyncExitStack, serving: ServingEngine) -> Shared:
        await self._show_dashboard(stack)
        load, trace = await self._paced(serving.url)
        clients = LoadClients(
            load,
            trace.length_s,
            serving.url,
            self._service.output,
            self._placing,
            self._waits,
            told=lambda state, detail: self._board.part("load", state, detail),
            at=lambda url: self._board.fact("metrics load", url or None),
        )
        stack.push_async_callback(clients.stop)
        self._phase("serving alone")
        self._say(f"serving alone, {trace.length_s:.0f} s of {trace.name}: {trace.attribution}")
        alone = await clients.alone()
        slo = self._slo(summarised(alone.records))
        self._phase("shared")
        status, page = await self._share(stack, clients, slo)
        return Shared(status, Path(page.output), page.started_s, trace, slo, alone, clients.replays())

    def _slo(self, alone: LatencySummary) -> Slo:
        slo = slo_from(alone)
        self._board.fact("slo ttft s", slo.ttft_s)
        self._board.fact("slo tpot s", slo.tpot_s)
        self._say(f"its SLO from now on: TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.1f} ms")
        log.info("slo", ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, requests=alone.requests)
        return slo

    async def _share(self, stack: contextlib.AsyncExitStack, clients: LoadClients, slo: Slo) -> tuple[int, Page]:
        run = await start_child(self._run_program(), self._placing.behind_load, self._waits)
        self._watched.pids[run.pid] = "run"
        executor = contextlib.AsyncExitStack()
        stack.push_async_callback(executor.aclose)
        stack.push_async_callback(run.stop, _RUN_END_S, signal.SIGINT)
        self._board.part("run", "running")
        page = await page_of(run, _PAGE_S, self._waits)
        self._board.fact("run", page.run_id)
        status = await under_watch(run.wait(), clients.again(), self._lend(executor, run, slo))
        await clients.stop()
        self._board.part("run", "ended", f"with status {status}")
        failure = failure_of(status, run.death(), Path(page.output))
        if failure:
            log.error("the run failed", how=failure)
            self._say(failure)
            status = status or 1
        return status, page

    async def _lend(self, stack: contextlib.AsyncExitStack, run: DemoChild, slo: Slo) -> None:
        if self._plan.guest is None:
            self._board.part("executor", "left out", "for comparison")
            return
        try:
            lend = Path(await fact_of(run, "lend", _LEND_S, self._waits))
        except ClusterError:
            if run.exit_code is None:
                raise
            return  # how it ended is told by whoever waits for that
        program = executor_program(self._service, self._plan.guest, self._job, slo, self._placing.cores.serving, lend)
        executor = self._kept(program, self._placing.with_load)
        executor.started = lambda pid: self._watched.pids.update({pid: GUEST})
        stack.push_async_callback(executor.stop)
        await executor.keep()

    async def _show_dashboard(self, stack: contextlib.AsyncExitStack) -> None:
        log_path = self._service.output / "dashboard.log"
        # One port for all its starts, so that the address that was told leads to whichever runs.
        arguments = ("dashboard", "--port", str(free_port()), "--out", str(self._job.run.out))
        dashboard = self._kept(Program("dashboard", "rose.cli.main", arguments, log_path), self._placing.behind_load)
        keeping = asyncio.create_task(dashboard.keep(), name="dashboard")
        stack.push_async_callback(dashboard.stop)
        stack.callback(keeping.cancel)
        try:
            address = await dashboard.fact("address", _DASHBOARD_S)
            self._board.fact("dashboard", address)
            self._say(f"dashboard: {address}")
        except RoseError as error:
            self._say(f"no dashboard: {error.what}")

    def _kept(self, program: Program, place: Callable[[int], None]) -> KeptChild:
        return KeptChild(
            program, place, self._waits, lambda state, detail: self._board.part(program.name, state, detail)
        )

    def _run_program(self) -> Program:
        plain = ("--plain",) if self._plan.plain else ()
        arguments = ("run", str(self._plan.job), "--out", str(self._job.run.out), *plain)
        return Program("run", "rose.cli.main", arguments, env={"OMP_NUM_THREADS": "1"})

    def _phase(self, name: str) -> None:
        self._board.fact("phase", name)
        log.info("phase", name=name, at_s=time.time())

    def _report(self, shared: Shared) -> None:
        """Add to the run's report what only the director knows. Raises ClusterError if it cannot be written."""
        path = shared.output / REPORT
        if not path.exists():
            return
        report = RunReport.from_json(path.read_text(encoding="utf-8"))
        window = training_window(report, shared.began_at_s)
        serving = serving_section(shared.trace, shared.slo, shared.alone, shared.replays, window)
        dedicated = [engine.engine_id for engine in report.engines if engine.kind == "dedicated"]
        sharing = None
        if self._plan.guest is not None:
            sharing = sharing_section(self._watched, dedicated, shared.began_at_s)
        whole = report.model_copy(update={"serving": serving, "sharing": sharing})
        write_report(whole, shared.output)
        self._say(f"  serving    {serving_words(serving)}")
