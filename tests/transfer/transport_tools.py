"""What the tests of real transports share: objects in memory and in files, and servers of every kind."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.fetching import StreamClient
from rose_transfer.transport.frames import HEADER_BYTES
from rose_transfer.transport.interface import ObjectSource, ReadableObject
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.messages import KNOCK
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.serving import StreamServer
from rose_transfer.transport.shared_memory import SharedMemoryClient, SharedMemoryServer
from rose_transfer.transport.tcp import TcpClient, TcpServer

TOKEN = "a token of the tests"
PIECE = 4096
KNOCK_BYTES = HEADER_BYTES + len(KNOCK)
QUICK_CLIENT = ClientLimits(
    streams=4, window=4, piece_bytes=PIECE, greet_s=1.0, stall_s=1.0, retry_s=0.01, retry_s_max=0.05
)
QUICK_SERVER = ServerLimits(hello_s=0.2, idle_s=5.0, stall_s=0.5, keepalive_s=0.2)
OBJECTS = {
    "empty": b"",
    "short": b"one piece",
    "exact": Random(1).randbytes(3 * PIECE),
    "long": Random(2).randbytes(50 * PIECE + 99),
}


@dataclass
class Memory:
    """Objects in memory. Those in `broken` exist but cannot be read; every read is noted in `read`."""

    objects: dict[str, bytes] = field(default_factory=lambda: dict(OBJECTS))
    broken: set[str] = field(default_factory=set)
    read: list[tuple[str, int]] = field(default_factory=list)
    open_now: int = 0

    def has(self, key: str) -> bool:
        return key in self.objects

    def open(self, key: str) -> ReadableObject:
        self.open_now += 1
        return MemoryObject(self, key)


@dataclass
class MemoryObject:
    memory: Memory
    key: str

    @property
    def size_bytes(self) -> int:
        return len(self.memory.objects[self.key])

    def read_at(self, offset: int, length: int) -> bytes:
        if self.key in self.memory.broken:
            raise TransferError("the disk fails")
        self.memory.read.append((self.key, offset))
        return self.memory.objects[self.key][offset : offset + length]

    def close(self) -> None:
        self.memory.open_now -= 1


@dataclass
class Folder:
    """Objects as files."""

    path: Path

    def has(self, key: str) -> bool:
        return (self.path / key).is_file()

    def open(self, key: str) -> ReadableObject:
        return FolderObject(self.path / key)


@dataclass
class FolderObject:
    path: Path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def read_at(self, offset: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def close(self) -> None:
        pass


@dataclass
class Pair:
    """A started server and a way to make clients of it."""

    server: StreamServer
    waits: WaitBoard
    connect: Callable[..., StreamClient]


@dataclass
class Certificates:
    """A self-signed certificate for 127.0.0.1."""

    folder: Path

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.folder / "cert.pem"))


def make_certificates(folder: Path) -> Certificates:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=rose "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    return Certificates(folder)


@asynccontextmanager
async def tcp_pair(
    source: ObjectSource,
    *,
    tls: Certificates | None = None,
    limits: ServerLimits = QUICK_SERVER,
    bandwidth_bytes_per_s: float | None = None,
) -> AsyncIterator[Pair]:
    waits = WaitBoard()
    server = TcpServer(
        source,
        token=TOKEN,
        waits=waits,
        tls=tls.server if tls else None,
        limits=limits,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    clients: list[StreamClient] = []
    # Dozens of handshakes at once take a busy machine longer than the tests' usual patience.
    patience = replace(QUICK_CLIENT, greet_s=5.0) if tls else QUICK_CLIENT

    def connect(token: str = TOKEN, limits: ClientLimits = patience, port: int | None = None) -> StreamClient:
        clients.append(
            TcpClient(
                "127.0.0.1",
                port or server.port,
                token=token,
                waits=waits,
                tls=tls.client if tls else None,
                limits=limits,
            )
        )
        return clients[-1]

    async with running(Pair(server, waits, connect), clients) as pair:
        yield pair


@asynccontextmanager
async def shared_pair(source: ObjectSource, folder: Path) -> AsyncIterator[Pair]:
    waits = WaitBoard()
    socket_path, spool = folder / "transfer.sock", folder / "spool"
    spool.mkdir(exist_ok=True)
    server = SharedMemoryServer(
        source, token=TOKEN, waits=waits, socket_path=socket_path, spool=spool, limits=QUICK_SERVER
    )
    clients: list[StreamClient] = []

    def connect(token: str = TOKEN) -> StreamClient:
        clients.append(SharedMemoryClient(socket_path, token=token, waits=waits))
        return clients[-1]

    async with running(Pair(server, waits, connect), clients) as pair:
        yield pair


@asynccontextmanager
async def running(pair: Pair, clients: list[StreamClient]) -> AsyncIterator[Pair]:
    await pair.server.start()
    try:
        yield pair
    finally:
        for client in clients:
            await client.close()
        await pair.server.close()
        # Connections that ended just before the server have tasks whose end is one turn of the loop away.
        await until(lambda: pair.waits.snapshot() == ())


async def fetched(client: StreamClient, key: str, deadline_s: float = 20.0) -> bytes:
    landing = MemoryLanding()
    await client.fetch(key, landing, deadline_s=deadline_s)
    return bytes(landing.bytes_view)


def all_at_once(attempts: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Attempts that have nothing to do with each other mostly wait: together they take no longer than one."""

    async def check() -> None:
        async with asyncio.TaskGroup() as group:
            for attempt in attempts:
                group.create_task(attempt)

    asyncio.run(check())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)
