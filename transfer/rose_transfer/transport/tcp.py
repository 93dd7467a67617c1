"""Objects over TCP: several connections to one server, resumed piece by piece, under a cap, with a token and TLS.

Both sides always prove that they know the token. Without TLS the bytes travel in the clear: do that on loopback, inside
a private network or through a tunnel. The server binds to loopback unless told otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rose.waits import WaitBoard
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.doorstep import Doorstep
from rose_transfer.transport.fetching import StreamClient
from rose_transfer.transport.interface import MakeContext, ObjectSource
from rose_transfer.transport.link import Link
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.serving import StreamServer

LOOPBACK = "127.0.0.1"


class TcpServer(StreamServer):
    """Listens on `host` and `port`; 0 takes any free port, which `port` tells once started.

    Raises ConfigError if the token is shorter than 16 bytes.
    """

    def __init__(
        self,
        source: ObjectSource,
        *,
        token: str,
        waits: WaitBoard,
        host: str = LOOPBACK,
        port: int = 0,
        tls: MakeContext | None = None,
        bandwidth_bytes_per_s: float | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        super().__init__(
            source,
            token=token,
            waits=waits,
            name=f"transfer server {host}:{port or '*'}",
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            limits=limits or ServerLimits(),
        )
        self._host = host
        self.port = port
        self._tls = tls
        self._doorstep: Doorstep | None = None

    async def close(self) -> None:
        if self._doorstep is not None:
            self._doorstep.close()
        await super().close()

    async def _listen(self, make_link: Callable[[], Link]) -> asyncio.Server:
        make: Callable[[], asyncio.BaseProtocol] = make_link
        if self._tls is not None:
            self._doorstep = Doorstep(
                make_link, self._tls, self.limits, waits=self.waits, server=self.name, tell=self.tell_of
            )
            make = self._doorstep.make_protocol
        server = await asyncio.get_running_loop().create_server(make, self._host, self.port, backlog=256)
        self.port = server.sockets[0].getsockname()[1]
        return server


class TcpClient(StreamClient):
    """Pulls from the server at `host` and `port`; with `tls`, its certificate must be for `host`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        waits: WaitBoard,
        tls: MakeContext | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        super().__init__(
            token=token,
            waits=waits,
            server=f"{host}:{port}",
            limits=limits or ClientLimits(),
            over_tls=tls is not None,
        )
        self._host = host
        self._port = port
        self._tls = tls

    async def _dial(self, make_link: Callable[[], Link]) -> None:
        context = None if self._tls is None else self._tls()
        await asyncio.get_running_loop().create_connection(make_link, self._host, self._port, ssl=context)
