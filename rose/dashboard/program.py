"""The dashboard as a process: its folders, log and status page, from the first line to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from rose.dashboard.app import make_app
from rose.dashboard.hub import Hub
from rose.dashboard.page_state import PART
from rose.errors import ClusterError
from rose.logs import logger, open_log
from rose.metrics import ADDRESS, DashboardMetrics
from rose.observer.measures import SeriesKey
from rose.observer.observer import observe
from rose.observer.series import SeriesStore
from rose.runs import open_service, runtime_root
from rose.status import StatusBoard
from rose.waits import WaitBoard

log = logger("dashboard")

_CONNECTIONS_MAX = 128
_END_GRACE_S = 2.0


def run_dashboard(port: int, out: Path, ready: Callable[[str], None]) -> bool:
    """Serve until a signal. Whether that was SIGTERM. Main thread only.

    `ready` is told the address once it answers. Raises ClusterError if a folder or the port cannot be had.
    """
    waits = WaitBoard()
    root = runtime_root()
    with (
        contextlib.closing(_listening(port)) as listening,
        open_service("dashboard", out.absolute(), waits, {}) as run,
        open_log(run.output / "log.jsonl"),
        StatusBoard(run, waits) as board,
    ):
        return asyncio.run(_serve(root, listening, waits, board, ready))


async def _serve(
    root: Path, listening: socket.socket, waits: WaitBoard, board: StatusBoard, ready: Callable[[str], None]
) -> bool:
    store: SeriesStore[SeriesKey] = SeriesStore()
    metrics = DashboardMetrics()
    hub = Hub(store, waits, metrics)
    server = _Server(_config(hub, metrics))
    asked: list[signal.Signals] = []

    def ask(signum: signal.Signals) -> None:
        asked.append(signum)
        server.should_exit = True
        hub.close()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ask, signum)
    address = f"http://{ADDRESS}:{listening.getsockname()[1]}"
    board.fact("address", f"{address}/")
    board.fact("metrics", f"{address}/metrics")
    board.part(PART, "serving")
    log.info("serving", page=address)
    looking = asyncio.create_task(observe(root, waits, store, hub.seen), name="observer")

    def end(_: asyncio.Task[None]) -> None:
        server.should_exit = True
        hub.close()

    looking.add_done_callback(end)  # without looks there is nothing to serve
    try:
        ready(f"{address}/")
        await server.serve(sockets=[listening])
    finally:
        looking.cancel()
        await asyncio.wait([looking])
    if not looking.cancelled():
        looking.result()
    log.info("ended", by=asked[0].name if asked else "itself")
    return asked[:1] == [signal.SIGTERM]


def _config(hub: Hub, metrics: DashboardMetrics) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(hub, metrics.registry),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_graceful_shutdown=int(_END_GRACE_S),
    )


class _Server(uvicorn.Server):
    """Signals are the program's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port))
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise ClusterError(
            f"port {port} for the dashboard: {'taken' if taken else error}",
            expected="a free port on the loopback interface",
            to_do="choose another port, or 0 for any free one",
        ) from error
