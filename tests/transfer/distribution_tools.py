"""What the tests of distribution share: a store that is served, an engine that has only a folder and steps, links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from store_tools import Bits, publish_line
from transport_tools import PIECE, QUICK_SERVER, TOKEN, TcpClient

from rose.simulator import small_model
from rose.waits import WaitBoard
from rose_transfer.distribution import MakeServer, Receiver, Relay, WeightPublisher
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import BucketId, Packing, Store
from rose_transfer.store.objects import is_key
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.interface import ObjectSource, ReadableObject
from rose_transfer.transport.tcp import TcpServer

Engine = small_model.Engine
WATCH_S = 0.6
PATIENT = 30.0
CLIENT = ClientLimits(streams=2, window=2, piece_bytes=PIECE, greet_s=1.0, stall_s=1.0, retry_s=0.01, retry_s_max=0.05)


class Counted:
    """A source that counts the payload of the store's objects that is read from it; `made` has all keys asked for."""

    def __init__(self, source: ObjectSource) -> None:
        self._source = source
        self.object_bytes = 0
        self.made: list[str] = []

    async def prepare(self, key: str) -> None:
        self.made.append(key)
        await self._source.prepare(key)  # type: ignore[attr-defined]

    def has(self, key: str) -> bool:
        return self._source.has(key)

    def open(self, key: str) -> ReadableObject:
        return _CountedObject(self, key, self._source.open(key))


class _CountedObject:
    def __init__(self, counted: Counted, key: str, inner: ReadableObject) -> None:
        self._counted, self._key, self._inner = counted, key, inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        data = self._inner.read_at(offset, length)
        if is_key(self._key):
            self._counted.object_bytes += len(data)
        return data

    def close(self) -> None:
        self._inner.close()


class Site:
    """Makes servers, clients, receivers and relays of one test, and closes what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waits = WaitBoard()
        self.counted: list[Counted] = []
        self._clients: list[TcpClient] = []
        self._receivers: list[Receiver] = []
        self._made = 0

    def serve(self, port: int = 0) -> MakeServer:
        def make(source: ObjectSource) -> TcpServer:
            self.counted.append(Counted(source))
            return TcpServer(self.counted[-1], token=TOKEN, waits=self.waits, port=port, limits=QUICK_SERVER)

        return make

    def client(self, port: int, token: str = TOKEN) -> TcpClient:
        self._clients.append(TcpClient("127.0.0.1", port, token=token, waits=self.waits, limits=CLIENT))
        return self._clients[-1]

    def receiver(
        self, port: int, name: str = "", wanted: Callable[[Packing], Collection[BucketId]] | None = None
    ) -> Receiver:
        self._made += 1
        folder = self.folder / (name or f"receiver-{self._made}")
        made = Receiver(self.client(port), folder, waits=self.waits, wanted=wanted, watch_s=WATCH_S)
        self._receivers.append(made)
        return made

    @asynccontextmanager
    async def relay(
        self, upstream_port: int, name: str = "relay", *, port: int = 0, keep: int = 4, bytes_max: int | None = None
    ) -> AsyncIterator[Relay]:
        """A relay that follows, until the end of the `with`."""
        client = self.client(upstream_port)
        relay = Relay(
            client,
            self.folder / name,
            waits=self.waits,
            serve=[self.serve(port)],
            keep=keep,
            bytes_max=bytes_max,
            watch_s=WATCH_S,
        )
        async with relay:
            following = asyncio.create_task(relay.run())
            try:
                yield relay
            finally:
                following.cancel()
                await asyncio.wait([following])
        await self.end(client)

    async def end(self, client: TcpClient) -> None:
        self._clients.remove(client)
        await client.close()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for receiver in self._receivers:
            receiver.close()


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    made = Site(folder)
    try:
        yield made
    finally:
        await made.close()
    assert made.waits.snapshot() == ()


@asynccontextmanager
async def offered(where: Site, store: Store, *, port: int = 0) -> AsyncIterator[tuple[Outlet, int]]:
    """The store is served; yields its outlet and the port."""
    outlet = Outlet(store, [where.serve(port)])
    await outlet.open()
    try:
        yield outlet, port_of(outlet)
    finally:
        await outlet.close()


def port_of(served: Outlet | Relay | WeightPublisher) -> int:
    (server,) = served.servers
    assert isinstance(server, TcpServer)
    return server.port


def line(folder: Path, versions: int, **how: float) -> tuple[Store, dict[int, list[Bits]]]:
    """A store with versions 1 to `versions`, and what they hold."""
    store = Store(folder, compress=True)
    return store, publish_line(store, versions, **how)  # type: ignore[arg-type]


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def free_port_pair() -> int:
    """The first of two free ports in a row."""
    while True:
        port = free_port()
        with socket.socket() as second, contextlib.suppress(OSError, OverflowError):
            second.bind(("127.0.0.1", port + 1))
            return port
