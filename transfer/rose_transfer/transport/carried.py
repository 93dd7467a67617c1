"""Server and client whose pieces cross on another path, beside a TCP connection that says what and when.

Invariants
- A client that was made for one path and finds another, or none, says so; it never mistakes bytes.
- Bytes reach a landing only in the client's lane, after their checksum was found right, and only while their fetch
  still waits: a fetch that was given up waits for nothing on the other path, and nothing is written behind its back.
- A path that fails, stalls or dies costs its connection; what was under way is asked for again on a new one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from rose.errors import RoseError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_transfer.transport.carrier import Borrower, Giver, Lender, Taker
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.dialed import Dialed, DialedOwner
from rose_transfer.transport.frames import PIECE_BYTES_MAX, Frame, Header, Kind
from rose_transfer.transport.interface import ObjectSource
from rose_transfer.transport.lanes import Lane
from rose_transfer.transport.link import Link, LinkEnded
from rose_transfer.transport.messages import Data, Lent, Offer, ProtocolError, Taken, parse, to_frame
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.serving import Peer
from rose_transfer.transport.tcp import LOOPBACK, TcpClient, TcpServer

# A piece beside the connection costs a round trip on it, so pieces are as long as they may be.
_LONG_PIECES = ClientLimits(streams=2, window=4, piece_bytes=PIECE_BYTES_MAX)


class CarriedServer(TcpServer):
    """Listens as TcpServer does; what is asked for crosses by `lender`."""

    def __init__(
        self,
        source: ObjectSource,
        *,
        lender: Lender,
        token: str,
        waits: WaitBoard,
        host: str = LOOPBACK,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        bandwidth_bytes_per_s: float | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        super().__init__(
            source,
            token=token,
            waits=waits,
            host=host,
            port=port,
            tls=tls,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            limits=limits,
        )
        self.lender = lender

    def make_peer(self) -> Peer:
        return _CarriedPeer(self)

    async def close(self) -> None:
        await super().close()
        self.lender.close()


class _CarriedPeer(Peer):
    def __init__(self, server: CarriedServer) -> None:
        super().__init__(server)
        self._carried = server
        self._giver: Giver | None = None
        self._taken: tuple[int, asyncio.Event] | None = None

    def arrived(self, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.TAKEN and self._taken is not None and frame.request == self._taken[0]:
            self._taken[1].set()
        else:
            super().arrived(link, frame)

    async def send_piece(self, data: Data, payload_sum: int, moved: Callable[[], None]) -> None:
        """Lend one piece and wait until it was taken; an empty one goes with its frame. Raises LinkEnded."""
        if not data.payload:
            await super().send_piece(data, payload_sum, moved)
            return
        try:
            await self._lend(data, payload_sum, moved)
        except RoseError as error:
            logger("transfer").warning("path lost", server=self._carried.name, why=str(error))
            self.end()
            raise LinkEnded(error.what) from error

    async def _lend(self, data: Data, payload_sum: int, moved: Callable[[], None]) -> None:
        server = self._carried
        if self._giver is None:
            self._giver = server.lender.giver()
            self.link.send(to_frame(Offer(self._giver.offer)))
        taken = asyncio.Event()
        self._taken = data.request, taken
        async with self._giver.lend(data.payload) as place:
            moved()
            lent = Lent(data.request, data.offset, data.size, len(data.payload), payload_sum, place)
            self.link.send(to_frame(lent))
            # The session ends the connection of a peer that does not take in time.
            with server.waits.waiting("a piece to be taken", f"a peer of {server.name}", server.limits.stall_s):
                await taken.wait()
        self._taken = None

    def _leave(self) -> None:
        super()._leave()
        if self._giver is not None:
            self._giver.cut()


class CarriedClient(TcpClient):
    """Connects as TcpClient does; what it fetches crosses by `borrower`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        borrower: Borrower,
        token: str,
        waits: WaitBoard,
        tls: ssl.SSLContext | None = None,
        limits: ClientLimits = _LONG_PIECES,
    ) -> None:
        super().__init__(host, port, token=token, waits=waits, tls=tls, limits=limits)
        self._borrower = borrower
        self._takers = ThreadPoolExecutor(limits.streams, thread_name_prefix="rose-take")

    def _make_dialed(self, number: int, lane: Lane) -> Dialed:
        path = _Path(self._borrower, self._takers, self._waits, self._server, self._limits.stall_s)
        return _CarriedDialed(number, lane, self, path)

    async def close(self) -> None:
        await super().close()
        # Not waited for: every taker was cut, and ends by itself.
        self._takers.shutdown(wait=False, cancel_futures=True)
        self._borrower.close()


@dataclass(frozen=True, slots=True)
class _Path:
    """What a connection needs of its client to take pieces."""

    borrower: Borrower
    threads: ThreadPoolExecutor
    waits: WaitBoard
    server: str
    stall_s: float


class _CarriedDialed(Dialed):
    def __init__(self, number: int, lane: Lane, owner: DialedOwner, path: _Path) -> None:
        super().__init__(number, lane, owner)
        self._path = path
        self._taker: Taker | None = None
        self._taking: asyncio.Task[None] | None = None

    def arrived(self, link: Link, frame: Frame) -> None:
        try:
            message = parse(frame) if frame.kind in (Kind.OFFER, Kind.LENT) else None
            match message:
                case Offer(text):
                    self._accept(text)
                case Lent():
                    self._begin(link, message)
                case None if frame.kind is Kind.DATA and frame.payload:
                    raise ProtocolError("received a piece on the connection instead of beside it")
                case None:
                    super().arrived(link, frame)
        except RoseError as error:
            self._break(link, error.what)

    def _accept(self, offer: bytes) -> None:
        if self._taker is not None:
            raise ProtocolError("received a second offer")
        self._taker = self._path.borrower.taker(offer)

    def _begin(self, link: Link, lent: Lent) -> None:
        if self._taker is None or self._taking is not None:
            raise ProtocolError("received a piece out of turn")
        self.heard(link)
        self._taking = self.lane.loop.create_task(self._take(link, self._taker, lent))

    async def _take(self, link: Link, taker: Taker, lent: Lent) -> None:
        path = self._path
        try:
            work = self.lane.loop.run_in_executor(path.threads, taker.take, lent, path.stall_s)
            # The thread keeps the deadline; here it is only that of a thread that was never free.
            bytes_ = await path.waits.within(
                work, "a piece beside the connection", path.server, 2 * path.stall_s, boundary="transfer"
            )
            if xxhash.xxh3_64_intdigest(bytes_) != lent.payload_sum:
                raise ProtocolError("took a piece that does not match its checksum")
        except RoseError as error:
            self._break(link, str(error))
            return
        self._taking = None
        self._put(link, lent, bytes_)
        link.send(to_frame(Taken(lent.request)))

    def _put(self, link: Link, lent: Lent, bytes_: memoryview) -> None:
        room = self.place(link, Header(Kind.DATA, lent.request, lent.offset, lent.size, lent.length))
        if room is not None:
            room[:] = bytes_
        payload = bytes(bytes_) if room is None else room
        super().arrived(link, to_frame(Data(lent.request, lent.offset, lent.size, payload)))

    def _break(self, link: Link, why: str) -> None:
        link.abort()
        self.ended(link, why)

    def ended(self, link: Link, why: str) -> None:
        self._cut_taker()
        super().ended(link, why)

    def _abort(self) -> None:
        self._cut_taker()
        super()._abort()

    def _cut_taker(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        if self._taker is not None:
            self._taker.cut()
