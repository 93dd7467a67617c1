"""A scheduler's service in this process or as one of its own, and what speaks to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rose.access import credentials
from rose.metrics import SchedulerMetrics
from rose.proto.v1.scheduler_pb2_grpc import SchedulerStub
from rose.waits import WaitBoard
from rose_scheduler.client import EngineState, SchedulerClient, Turn
from rose_scheduler.desk import Desk
from rose_scheduler.events import EngineKind, EngineOffered
from rose_scheduler.lease_stream import LeaseStream
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement
from rose_scheduler.service import serve

TOKEN = "0123456789abcdef" * 2
LONG_S = 60.0
"""Longer than anything here takes, also on a busy machine."""


@dataclass(slots=True)
class Site:
    """A service in this process; `client` speaks to it, `stub` says what no client would."""

    desk: Desk
    address: str
    waits: WaitBoard
    metrics: SchedulerMetrics
    client: SchedulerClient
    stub: Any
    channel: grpc.aio.Channel
    server: grpc.aio.Server
    leases: LeaseStream

    async def say(self, request: Any) -> Any:
        """On a call of its own, or on the stream of leases."""
        name = type(request).__name__.removesuffix("Request")
        leases = self.leases
        on_stream = {"AskLease": leases.ask, "EndLease": leases.end, "EndTrajectory": leases.end_trajectory}
        if name in on_stream:
            return await on_stream[name](request, LONG_S)
        return await getattr(self.stub, name)(request, timeout=LONG_S, metadata=credentials(TOKEN))

    def another_stream(self) -> LeaseStream:
        return LeaseStream(self.stub.Leases(metadata=credentials(TOKEN)))

    async def joined(self, engine_id: str = "e", *, most: int = 1, incarnation: str = "1", version: int = 0) -> None:
        """Offer an engine that beats once, which lasts."""
        engine = offered(engine_id, most=most, incarnation=incarnation, version=version)
        await self.client.offer(engine)
        await self.client.beat(engine, EngineState(version, most, 0.0))

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"rose_scheduler_{name}", labels) or 0.0


def offered(engine_id: str = "e", *, most: int = 1, incarnation: str = "1", version: int = 0) -> EngineOffered:
    address, counts = f"http://at-{engine_id}", f"counts-of-{engine_id}:1"
    return EngineOffered(engine_id, incarnation, EngineKind.LENT, address, most, version, counts)


def turn(number: int = 0, *, group: int = 0, min_version: int = 0) -> Turn:
    return Turn(f"trajectory-{number}", f"group-{group}", 1, 10, min_version)


@asynccontextmanager
async def site(**limits: float) -> AsyncIterator[Site]:
    """Engines beat once and stay healthy, unless other limits are asked for."""
    waits, metrics = WaitBoard(), SchedulerMetrics()
    given = {"beat_deadline_s": 10 * LONG_S, "dead_after_s": 20 * LONG_S, **limits}
    desk = Desk(Placement(Limits(**given)), waits, metrics)  # type: ignore[arg-type]
    server, address = await serve(desk, port=0, token=TOKEN)
    channel = grpc.aio.insecure_channel(address)
    stub = SchedulerStub(channel)
    leases = LeaseStream(stub.Leases(metadata=credentials(TOKEN)))
    async with SchedulerClient(address, token=TOKEN, waits=waits, timeout_s=LONG_S) as client:
        try:
            yield Site(desk, address, waits, metrics, client, stub, channel, server, leases)
        finally:
            leases.close()
            await channel.close()
            desk.close()
            await server.stop(None)


async def until(so: Callable[[], bool]) -> None:
    """Wait for something to become so."""
    async with asyncio.timeout(LONG_S):
        while not so():
            await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class SchedulerProcess:
    """`rose scheduler` at one port, to be killed and started again; an engine that has beaten once stays healthy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        config = folder / "scheduler.toml"
        config.write_text(
            f'[scheduler]\ntoken_file = "token"\nout = "runs"\nport = {self.port}\n'
            f"[limits]\nbeat_deadline_s = {10 * LONG_S}\ndead_after_s = {20 * LONG_S}\n"
        )
        self._arguments = ["--config", config]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Its first line."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rose.cli.main",
            "scheduler",
            *map(str, self._arguments),
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "ROSE_RUNTIME_DIR": str(self.folder / "runtime"),
            },
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(LONG_S):
            said = (await self._process.stdout.readline()).decode().strip()
        assert said, "it ended before it served"
        return said

    async def end(self, signum: signal.Signals) -> int:
        """Its exit status."""
        assert self._process is not None
        self._process.send_signal(signum)
        async with asyncio.timeout(LONG_S):
            return await self._process.wait()

    def signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("runs/*/log.jsonl")))

    async def __aenter__(self) -> SchedulerProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
