"""Servers and clients whose pieces cross beside the connection, for tests."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from test_transport_faults import Stranger
from transport_tools import OBJECTS, QUICK_CLIENT, QUICK_SERVER, TOKEN, Pair, fetched, running, until

from rose.errors import DeadlineExceeded
from rose.waits import WaitBoard
from rose_transfer.transport.carried import CarriedClient, CarriedServer
from rose_transfer.transport.carrier import Borrower, Lender
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.collective import Collective, CollectiveBorrower, CollectiveLender
from rose_transfer.transport.fetching import StreamClient
from rose_transfer.transport.gloo_collective import GlooCollective
from rose_transfer.transport.interface import ObjectSource
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.messages import Busy, Message
from rose_transfer.transport.nccl_collective import NcclCollective
from rose_transfer.transport.nixl_agent import NixlAgent
from rose_transfer.transport.rdma import RdmaBorrower, RdmaLender
from rose_transfer.transport.server_session import ServerLimits

# Threads hand pieces on, and make a communicator for each connection: few connections, and time for them.
CARRIED_CLIENT = replace(QUICK_CLIENT, streams=1, stall_s=10.0)
CARRIED_SERVER = replace(QUICK_SERVER, stall_s=10.0)
NCCL_SHARES_A_GPU = 23000
SHARE_A_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
UCX_PATHS = {"tcp": "tcp", "shared memory": "shm,cma,tcp"}


def need_nixl() -> None:
    if not any(importlib.util.find_spec(package) for package in ("nixl_cu12", "nixl_cu13")):
        pytest.skip("NIXL is not installed: pip install --no-deps nixl-cu12==1.5.1")


@functools.cache
def nixl_agents(path: str) -> tuple[NixlAgent, NixlAgent]:
    """One agent for servers and one for clients, on one of UCX_PATHS, for the whole test process."""
    need_nixl()
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = UCX_PATHS[path]
    try:
        return NixlAgent(lends=True), NixlAgent(lends=False)
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before


@asynccontextmanager
async def rdma_pair(
    source: ObjectSource, path: str, *, limits: ServerLimits = CARRIED_SERVER, slots: int = 16, port: int = 0
) -> AsyncIterator[Pair]:
    lending, borrowing = nixl_agents(path)
    waits = WaitBoard()
    lender = RdmaLender(lending, waits=waits, slots=slots)
    async with carried_pair(source, lender, lambda: RdmaBorrower(borrowing), waits, limits, port) as pair:
        yield pair
    assert lender._free.qsize() == slots


def gloo_pair(
    source: ObjectSource, *, limits: ServerLimits = CARRIED_SERVER, port: int = 0
) -> AbstractAsyncContextManager[Pair]:
    return collective_pair(source, GlooCollective(), GlooCollective(), limits=limits, port=port)


def gpus_for_two_ranks() -> tuple[int, int]:
    """Two GPUs, or one twice where NCCL can share it, as this process's environment must allow."""
    cupy, nccl = pytest.importorskip("cupy"), pytest.importorskip("cupy.cuda.nccl")
    if cupy.cuda.runtime.getDeviceCount() > 1:
        return 0, 1
    if nccl.get_version() < NCCL_SHARES_A_GPU or os.environ.get(SHARE_A_GPU) != "1":
        pytest.skip(f"two ranks on one GPU need NCCL 2.30 and {SHARE_A_GPU}=1 in the environment")
    return 0, 0


def nccl_collectives() -> tuple[NcclCollective, NcclCollective]:
    lending, borrowing = gpus_for_two_ranks()
    return NcclCollective(lending), NcclCollective(borrowing)


def nccl_pair(
    source: ObjectSource, *, limits: ServerLimits = CARRIED_SERVER, port: int = 0
) -> AbstractAsyncContextManager[Pair]:
    lending, borrowing = nccl_collectives()
    return collective_pair(source, lending, borrowing, limits=limits, port=port)


@asynccontextmanager
async def collective_pair(
    source: ObjectSource,
    lending: Collective,
    borrowing: Collective,
    *,
    limits: ServerLimits = CARRIED_SERVER,
    port: int = 0,
) -> AsyncIterator[Pair]:
    waits = WaitBoard()
    lender = CollectiveLender(lending, waits=waits, stall_s=limits.stall_s)
    borrower = CollectiveBorrower(borrowing)
    async with carried_pair(source, lender, lambda: borrower, waits, limits, port) as pair:
        yield pair


@asynccontextmanager
async def carried_pair(
    source: ObjectSource,
    lender: Lender,
    borrower: Callable[[], Borrower],
    waits: WaitBoard,
    limits: ServerLimits,
    port: int,
) -> AsyncIterator[Pair]:
    server = CarriedServer(source, lender=lender, token=TOKEN, waits=waits, port=port, limits=limits)
    clients: list[StreamClient] = []

    def connect(token: str = TOKEN, limits: ClientLimits = CARRIED_CLIENT, port: int | None = None) -> StreamClient:
        client = CarriedClient(
            "127.0.0.1", port or server.port, borrower=borrower(), token=token, waits=waits, limits=limits
        )
        clients.append(client)
        return client

    async with running(Pair(server, waits, connect), clients) as pair:
        yield pair


Successor = Callable[[int], AbstractAsyncContextManager[Pair]]
"""Serves at a port."""


@dataclass(frozen=True)
class Doomed:
    """A server of OBJECTS in a process of its own, and a client of it; at its 20th read it signals itself."""

    process: subprocess.Popen[str]
    port: int
    client: CarriedClient

    async def freezes_and_thaws(self, deadline_s: float) -> None:
        """Whoever fetches while it is frozen waits until the deadline only, and is served once it goes on."""
        with pytest.raises(DeadlineExceeded, match="long"):
            await self.client.fetch("long", MemoryLanding(), deadline_s=deadline_s)
        self.process.send_signal(signal.SIGCONT)
        assert await fetched(self.client, "long", deadline_s=60) == OBJECTS["long"]

    async def dies_in_a_fetch(self, successor: Successor) -> None:
        """The fetch goes on with whoever serves at the port then."""
        buffer = bytearray(len(OBJECTS["long"]))
        fetch = asyncio.ensure_future(self.client.fetch("long", MemoryLanding(buffer), deadline_s=60))
        await until(lambda: any(buffer))
        self.process.kill()
        await asyncio.to_thread(self.process.wait, 30)
        assert not fetch.done()
        async with successor(self.port):
            await fetch
            assert buffer == OBJECTS["long"]


@asynccontextmanager
async def doomed(
    path: str, signal_: int, borrower: Borrower, limits: ClientLimits, env: dict[str, str] | None = None
) -> AsyncIterator[Doomed]:
    """A server that lends by `path`, with `env` beside this process's environment, until the body ends."""
    process, port = _start(path, signal_, env or {})
    client = CarriedClient("127.0.0.1", port, borrower=borrower, token=TOKEN, waits=WaitBoard(), limits=limits)
    try:
        yield Doomed(process, port, client)
    finally:
        await client.close()
        process.kill()
        process.wait(10)


def _start(path: str, signal_: int, env: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    folders = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    main = Path(__file__).with_name("carried_server_main.py")
    process = subprocess.Popen(
        [sys.executable, str(main), path, str(int(signal_))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), **env},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


async def heard(stranger: Stranger) -> Message | None:
    """What the server says next, past its signs of life."""
    while isinstance(message := await stranger.hear(), Busy):
        pass
    return message
