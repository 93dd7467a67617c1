"""A real rollout engine for `kv` on one core, and the product's scheduler beside its client on the others.

Every run has an engine of its own, so none finds what another left in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession

from bench.registry import BenchFailed
from rose.demo.serving_model import ServingShape, make_serving_model
from rose.metrics import SchedulerMetrics
from rose.waits import WaitBoard
from rose_executor.engine_launcher import open_launcher
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.token_route import TokenRoute, open_session
from rose_scheduler.client import EngineState, SchedulerClient
from rose_scheduler.desk import Desk
from rose_scheduler.events import EngineKind, EngineOffered
from rose_scheduler.placement import Placement
from rose_scheduler.service import serve

SEQS = 64
BLOCK_TOKENS = 32
_TOKEN = "kv"
_START_S = 300.0
_TURN_S = 600.0
_BEAT_S = 0.2
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Prompt tokens that were looked for in the cache, and found; requests that were set back."""

    asked: float
    found: float
    preempted: float


@dataclass(slots=True)
class KvSite:
    """An engine that has just started, and a scheduler to which it is offered."""

    engine: EngineProcess
    route: TokenRoute
    scheduler: SchedulerClient
    session: ClientSession

    async def cache(self) -> CacheCounts:
        """From the engine's metrics. Raises BenchFailed if they do not say so."""
        async with self.session.get(f"{self.engine.base_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total")
        return CacheCounts(*(_value(lines, f"vllm:{name}") for name in names))


@contextlib.asynccontextmanager
async def open_engines(kv_tokens: int) -> AsyncIterator[EngineProcess]:
    """An engine that can be started again and again, with so many tokens of KV memory."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchFailed("one core for the engine, and one for its client are needed", expected="two cores")
    folder = Path(tempfile.mkdtemp(prefix="rose-kv-"))
    waits, shape = WaitBoard(), ServingShape()
    bytes_of_token = 2 * shape.layers * shape.kv_heads * shape.head_size * _FLOAT32_BYTES
    settings = EngineSettings(
        "engine",
        make_serving_model(folder / "model", shape),
        runtime_dir=folder,
        log_path=folder / "engine.log",
        max_model_len=shape.context_tokens,
        max_num_seqs=SEQS,
        block_size=BLOCK_TOKENS,
        kv_cache_bytes=kv_tokens * bytes_of_token,
        start_timeout_s=_START_S,
    )
    try:
        placed = open_launcher(waits, folder / "warm.log", _START_S, lambda pid: os.sched_setaffinity(pid, cores[:1]))
        async with placed as launcher:
            os.sched_setaffinity(0, cores[1:])
            yield EngineProcess(settings, launcher, waits)
    finally:
        os.sched_setaffinity(0, cores)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def open_site(engine: EngineProcess) -> AsyncIterator[KvSite]:
    """Start the engine, for one run.

    Raises BenchFailed if it has died when that is over; RoseError if it does not start.
    """
    waits = WaitBoard()
    await engine.start(0)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        session = await stack.enter_async_context(open_session())
        desk = Desk(Placement(), waits, SchedulerMetrics())
        server, address = await serve(desk, port=0, token=_TOKEN)
        stack.push_async_callback(server.stop, None)
        stack.callback(desk.close)
        client = await stack.enter_async_context(SchedulerClient(address, token=_TOKEN, waits=waits))
        offered = EngineOffered("engine", engine.incarnation, EngineKind.DEDICATED, engine.base_url, SEQS, 0)
        beating = asyncio.create_task(client.keep_offered(offered, _state(engine), every_s=_BEAT_S))
        stack.callback(beating.cancel)
        route = TokenRoute(engine.base_url, session, waits=waits, total_s=_TURN_S)
        yield KvSite(engine, route, client, session)
        if not engine.alive:
            raise BenchFailed(f"the engine: {engine.death()}")


def _state(engine: EngineProcess) -> Callable[[], EngineState]:
    page = engine.page
    return lambda: EngineState(0, SEQS, 0.0, page.kv_tokens, page.token_s)


def _value(lines: list[str], name: str) -> float:
    for line in lines:
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise BenchFailed(f"the engine's metrics have no {name}")
