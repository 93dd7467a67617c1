"""The scheduler as a process: its folders, log, status page and metrics, from the first line to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

from rose.access import read_token
from rose.certificates import Certificates, read_certificates
from rose.logs import logger, open_log
from rose.metrics import MetricsServer, SchedulerMetrics
from rose.metrics import serve as serve_metrics
from rose.runs import open_service
from rose.status import StatusBoard
from rose.stop import first_signal
from rose.waits import WaitBoard
from rose_scheduler.config import SchedulerConfig
from rose_scheduler.desk import Desk
from rose_scheduler.events import Health
from rose_scheduler.placement import Placement
from rose_scheduler.service import serve

log = logger("scheduler")

_SHOW_EVERY_S = 0.5
_END_GRACE_S = 1.0
"""For answers that are on their way."""


def run_scheduler(config: SchedulerConfig, ready: Callable[[str, str], None]) -> bool:
    """Serve until a signal. Whether that was SIGTERM. Main thread only.

    `ready` is told the address and that of the metrics, once both answer. Raises ConfigError if the token's file is
    none or certificates cannot be used, ClusterError if a folder or a port cannot be had, and what the core raised, if
    it ever does.
    """
    token = read_token(config.scheduler.token_file)
    certificates = read_certificates(config.scheduler.certificates)
    waits, metrics = WaitBoard(), SchedulerMetrics()
    section = config.scheduler
    with (
        open_service(section.name, section.out.absolute(), waits, {}) as run,
        open_log(run.output / "log.jsonl"),
        StatusBoard(run, waits) as board,
        contextlib.closing(serve_metrics(section.metrics_port, metrics.registry)) as server,
    ):
        return asyncio.run(_serve(config, token, certificates, waits, metrics, board, server, ready))


async def _serve(
    config: SchedulerConfig,
    token: str,
    certificates: Certificates | None,
    waits: WaitBoard,
    metrics: SchedulerMetrics,
    board: StatusBoard,
    metrics_server: MetricsServer,
    ready: Callable[[str, str], None],
) -> bool:
    desk = Desk(Placement(config.limits.limits()), waits, metrics)
    asked = first_signal()
    server, address = await serve(desk, port=config.scheduler.port, token=token, certificates=certificates)
    board.fact("address", address)
    board.fact("metrics", metrics_server.url)
    board.part("scheduler", "serving")
    log.info("serving", address=address, metrics=metrics_server.url)
    ready(address, metrics_server.url)
    showing = asyncio.create_task(_show(desk, board), name="status")
    try:
        ends: set[asyncio.Future[Any]] = {asked, desk.failed, showing}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        showing.cancel()
        desk.close()
        await server.stop(_END_GRACE_S)
    for one in done:
        one.result()
    log.info("ended", by=asked.result().name)
    return asked.result() is signal.SIGTERM


async def _show(desk: Desk, board: StatusBoard) -> None:
    while True:
        desk.show()
        core = desk.core
        healths = [engine.health for engine in core.engines]
        said = ", ".join(f"{healths.count(health)} {health}" for health in Health if health in healths)
        board.part("engines", "serving" if Health.HEALTHY in healths else "none healthy", said)
        board.fact("leases waiting", len(core.line))
        board.fact("leases held", len(core.leases) - len(core.line))
        board.fact("trajectories", len(core.trajectories))
        await asyncio.sleep(_SHOW_EVERY_S)
