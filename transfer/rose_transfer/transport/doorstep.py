"""Where a server that speaks TLS looks at how a connection begins: who speaks none is told so, in the clear.

TLS itself would end such a connection without a word, and its client would try again until its deadline.

Invariants
- What is looked at is not taken: TLS reads it again, from the first byte on.
- Only who left after all of its hello can have left because of our certificate.
- Nobody stays for more than twice `hello_s`, and at most `connections_max` are here at once.
- Nothing that a peer does here ends the server.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from rose.errors import DeadlineExceeded
from rose.logs import logger
from rose.waits import WaitBoard
from rose_transfer.transport.frames import Encoder
from rose_transfer.transport.interface import MakeContext
from rose_transfer.transport.link import Link
from rose_transfer.transport.messages import Fail, FailCode, to_frame
from rose_transfer.transport.mismatch import (
    NOT_ACCEPTED,
    TLS_HERE_ONLY,
    TLS_RECORDS,
    TLS_THERE_ONLY,
    Mismatch,
    missing_of_hello,
    of_handshake,
)
from rose_transfer.transport.server_session import ServerLimits

_LOOK_BYTES = 2**16


class Doorstep:
    """Of one server, called `server` in waits and logs; used from its loop. Who speaks TLS goes on as a link.

    `tell` is given what does not fit, and whose address that was.
    """

    def __init__(
        self,
        make_link: Callable[[], Link],
        tls: MakeContext,
        limits: ServerLimits,
        *,
        waits: WaitBoard,
        server: str,
        tell: Callable[[Mismatch, str], None],
    ) -> None:
        self._make_link = make_link
        self._tls = tls
        self._limits = limits
        self._waits = waits
        self._server = server
        self._tell = tell
        self._here: set[asyncio.Task[None]] = set()

    def make_protocol(self) -> asyncio.BaseProtocol:
        return _Arrival(self)

    def close(self) -> None:
        """Turn away whoever is here."""
        for task in self._here:
            task.cancel()

    def arrived(self, taken: socket.socket) -> None:
        """Of a connection from which nothing was read yet."""
        if len(self._here) >= self._limits.connections_max:
            taken.close()
            return
        task = asyncio.get_running_loop().create_task(self._let_in(taken))
        self._here.add(task)
        task.add_done_callback(self._here.discard)

    async def _let_in(self, taken: socket.socket) -> None:
        peer = _name(taken)
        try:
            opening = await self._waits.within(
                self._opening(taken),
                "first bytes",
                f"a peer of {self._server}",
                self._limits.hello_s,
                boundary="transfer",
            )
            if opening.startswith(TLS_RECORDS):
                await self._shake_hands(taken, peer, greeted=missing_of_hello(opening) == 0)
                return
            _leave_nothing_unread(taken)
            taken.send(Encoder().encode(to_frame(Fail(0, FailCode.TLS, TLS_THERE_ONLY.what))))
            self._tell(TLS_HERE_ONLY, peer)
        except (OSError, DeadlineExceeded) as error:
            logger("transfer").info("peer dropped", server=self._server, peer=peer, why=str(error))
            _leave_nothing_unread(taken)
        finally:
            taken.close()

    async def _opening(self, taken: socket.socket) -> bytes:
        """What it says first: its whole hello, if it speaks TLS and stays. Raises ConnectionError if it left."""
        seen, missing = b"", 1
        while missing:  # three times at most
            # What was seen is still there to be read: without this the loop would be told so again and again.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(seen) + missing)
            await _readable(taken)
            looked = taken.recv(_LOOK_BYTES, socket.MSG_PEEK)
            if len(looked) == len(seen):  # it ended
                break
            seen, missing = looked, missing_of_hello(looked) or 0
        if not seen:
            raise ConnectionResetError("left without a word")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return seen

    async def _shake_hands(self, taken: socket.socket, peer: str, *, greeted: bool) -> None:
        # From here on it is the transport's to close.
        own, hello_s = socket.socket(fileno=taken.detach()), self._limits.hello_s
        try:
            with self._waits.waiting("handshake of TLS", f"a peer of {self._server}", hello_s):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_link, own, ssl=self._tls(), ssl_handshake_timeout=hello_s
                )
        except OSError as error:
            # asyncio's clients say nothing when they do not accept a certificate: they leave.
            left = isinstance(error, ConnectionResetError) and greeted
            mismatch = NOT_ACCEPTED if left else of_handshake(error)
            if mismatch is None:
                raise
            self._tell(mismatch, peer)


class _Arrival(asyncio.Protocol):
    """What asyncio has accepted is taken from it before it reads."""

    def __init__(self, doorstep: Doorstep) -> None:
        self._doorstep = doorstep

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as error:
            logger("transfer").warning("a peer cannot be let in", why=str(error))
        else:
            taken.setblocking(False)
            self._doorstep.arrived(taken)
        transport.close()


async def _readable(taken: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(taken, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(taken)


def _leave_nothing_unread(taken: socket.socket) -> None:
    """What stays unread would reset the connection, and with that an answer could be lost."""
    with suppress(OSError):
        taken.recv(_LOOK_BYTES)


def _name(taken: socket.socket) -> str:
    try:
        host, port, *_ = taken.getpeername()
    except OSError:
        return ""
    return f"{host}:{port}"
