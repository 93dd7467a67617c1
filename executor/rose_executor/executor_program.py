"""The executor as a process: its folders, log, status page and metrics, from the first line to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from rose.access import read_token
from rose.address import host_and_port
from rose.certificates import Certificates, read_certificates
from rose.logs import logger, open_log
from rose.machine import look
from rose.metrics import ExecutorMetrics
from rose.metrics import serve as serve_metrics
from rose.runs import Run, open_service
from rose.status import StatusBoard
from rose.stop import first_signal
from rose.waits import WaitBoard
from rose_executor.agent import Agent
from rose_executor.agent_figures import AgentFigures
from rose_executor.board_states import ServingState
from rose_executor.counts_service import Questions, serve_counts
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_launcher import open_launcher
from rose_executor.executor_config import ExecutorConfig
from rose_executor.guest_keeper import GuestKeeper, Joined
from rose_executor.guest_life import receiving
from rose_executor.guest_plan import GuestPlan, open_watch, plan_guest
from rose_executor.guest_watch import GuestWatch
from rose_executor.lender import Lender
from rose_executor.page_shelf import PageShelf
from rose_executor.partitioner import Partitioner, pick_for_guest
from rose_executor.serving_observer import ServingObserver
from rose_executor.tiers import TierNow, memory_now, never_told, tier_now
from rose_transfer.transport.tcp import TcpClient

log = logger("executor")

_END_GRACE_S = 1.0
"""For answers that are on their way."""

OpenLender = Callable[[str, str, Certificates | None, WaitBoard], AbstractAsyncContextManager[Lender]]
"""Speaks to the scheduler at an address, with a token, and certificates if there are any."""


def run_executor(config: ExecutorConfig, open_lender: OpenLender, ready: Callable[[str, str], None]) -> bool:
    """Lend until a signal. Whether that was SIGTERM. Main thread only.

    `ready` is told the addresses of the counts and of the metrics, once both answer. Raises ConfigError for what cannot
    be used, ClusterError for a board, folder or port that cannot be had, EngineError for a guest that died too often,
    TransferError or SchedulerError where the run does not accept us.
    """
    token = read_token(config.join.token_file)
    certificates = read_certificates(config.executor.certificates)
    waits, section = WaitBoard(), config.executor
    with (
        open_service(section.name, section.out.absolute(), waits, {}) as run,
        open_log(run.output / "log.jsonl"),
        StatusBoard(run, waits) as status,
        contextlib.closing(PageShelf(section.state.absolute() / "pages", waits)) as shelf,
    ):
        plan = plan_guest(config, run, shelf.folder, look())
        limits, board = config.partition.limits, config.serving.board.absolute()
        with (
            contextlib.closing(pick_for_guest(section.cores, limits, board)) as partitioner,
            contextlib.closing(open_watch(config, partitioner, plan.profile)) as watch,
        ):
            program = _Program(config, token, certificates, waits, run, status, shelf, partitioner, plan, watch)
            return asyncio.run(program.run(open_lender, ready))


def _observer(config: ExecutorConfig, waits: WaitBoard) -> ServingObserver | None:
    """None where only a probe is looked for."""
    serving = config.serving
    return ServingObserver(serving.metrics, serving.board.absolute(), waits) if serving.metrics else None


class _Program:
    """What one process is made of, while its event loop runs."""

    def __init__(
        self,
        config: ExecutorConfig,
        token: str,
        certificates: Certificates | None,
        waits: WaitBoard,
        run: Run,
        status: StatusBoard,
        shelf: PageShelf,
        partitioner: Partitioner,
        plan: GuestPlan,
        watch: GuestWatch,
    ) -> None:
        self._config = config
        self._plan = plan
        self._watch = watch
        self._token = token
        self._certificates = certificates
        self._waits = waits
        self._status = status
        self._shelf = shelf
        self._partitioner = partitioner
        self._observer = _observer(config, waits)
        self._metrics = ExecutorMetrics()
        slo = config.serving.slo
        figures = AgentFigures(self._metrics, status, waits, slo, self._tier, lambda: plan.keeper.trouble)
        guest = GuestKeeper(
            plan.settings,
            EngineHealth(config.guest.restarts_max),
            watch,
            partitioner,
            shelf,
            figures,
            waits,
            partial(open_launcher, waits, run.output / "guest.log", config.guest.start_timeout_s),
            round(config.memory.keep_free_gib * 2**30),
        )
        self._agent = Agent(guest, watch, shelf, figures)

    async def run(self, open_lender: OpenLender, ready: Callable[[str, str], None]) -> bool:
        section, join = self._config.executor, self._config.join
        asked = first_signal()
        async with contextlib.AsyncExitStack() as stack:
            questions = Questions(self._agent.alive)
            server, counts_address = await serve_counts(
                self._shelf,
                questions.alive,
                port=section.port,
                token=self._token,
                certificates=self._certificates,
            )
            stack.push_async_callback(server.stop, _END_GRACE_S)
            stack.push_async_callback(questions.over, self._waits)
            shown = stack.enter_context(
                contextlib.closing(serve_metrics(section.metrics_port, self._metrics.registry, self._agent.unhealthy))
            )
            client = await stack.enter_async_context(self._client())
            opening = open_lender(join.scheduler, self._token, self._certificates, self._waits)
            lender = await stack.enter_async_context(opening)
            stack.callback(self._plan.keeper.save)
            self._tell(counts_address, shown.url)
            ready(counts_address, shown.url)
            weights = section.state.absolute() / "weights"
            joined = Joined(
                partial(receiving, client, weights, self._waits), lender, f"publisher {join.weights}", counts_address
            )
            await self._until_asked(asked, joined)
        log.info("ended", by=asked.result().name)
        return asked.result() is signal.SIGTERM

    async def _until_asked(self, asked: asyncio.Future[signal.Signals], joined: Joined) -> None:
        """Raises what ends the agent, or one of those beside it, by itself."""
        tasks = [
            asyncio.create_task(self._agent.run(joined), name="agent"),
            asyncio.create_task(self._plan.keeper.run(), name="profile keeper"),
        ]
        if self._observer is not None:
            tasks.append(asyncio.create_task(self._observer.run(), name="observer"))
        ends: set[asyncio.Future[Any]] = {asked, *tasks}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not asked.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _tier(self, serving: ServingState | None) -> TierNow:
        seen, why = self._watch.seen, self._watch.trouble
        if not why and self._observer is not None:
            why = self._observer.trouble
        elif not why and seen is not None and seen.serving.state is None:
            why = never_told(seen.serving.why, self._config.serving.board.absolute())
        serving_kv = None if seen is None else seen.serving_kv.state
        memory = memory_now(self._watch.rules.kv.figures(time.monotonic()), serving_kv)
        return tier_now(serving, self._partitioner.describe(), memory, why)

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[TcpClient]:
        host, port = host_and_port(self._config.join.weights)
        tls = None if self._certificates is None else self._certificates.client_context
        client = TcpClient(host, port, token=self._token, waits=self._waits, tls=tls)
        try:
            yield client
        finally:
            await client.close()

    def _tell(self, counts_address: str, metrics_url: str) -> None:
        join, partition = self._config.join, self._partitioner.describe()
        facts = {
            "counts": counts_address,
            "metrics": metrics_url,
            "scheduler": join.scheduler,
            "weights": join.weights,
            "board": str(self._config.serving.board.absolute()),
        }
        for name, value in facts.items():
            self._status.fact(name, value)
        self._status.part("partition", partition.name, f"{partition.binds}; what it costs: {partition.costs}")
        log.info("lending", **facts, partition=partition.name, profiled=self._plan.profiled)
        memory = self._watch.rules.kv.figures(time.monotonic())
        if memory is not None and memory.unfit:
            log.warning("the pool may never have room for the guest", why=memory.unfit)
