"""Server and client whose pieces cross on another path, beside a TCP connection that says what and when.

Invariants
- A client that was made for one path and finds another, or none, says so; it never mistakes bytes.
- Bytes reach a landing only in the client's lane, after their checksum was found right, and only while their fetch
  still waits: a fetch that was given up waits for nothing on the other path, and nothing is written behind its back.
- A path that fails, stalls or dies costs its connection; what was under way is asked for again on a new one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import xxhash

from rose.errors import RoseError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_transfer.transport.carrier import Borrower, Giver, Lender, Taker
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.dialed import Dialed, DialedOwner
from rose_transfer.transport.frames import Frame, Header, Kind
from rose_transfer.transport.interface import MakeContext, ObjectSource
from rose_transfer.transport.lanes import Lane
from rose_transfer.transport.link import Link
from rose_transfer.transport.messages import Data, Lent, Offer, ProtocolError, Taken, parse, to_frame
from rose_transfer.transport.mismatch import Mismatch
from rose_transfer.transport.peer import Peer
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.tcp import LOOPBACK, TcpClient, TcpServer

# Longer ones leave the processor's cache, and UCX's TCP is slow at them (`bench/rdma_choice.py`).
_PIECES = ClientLimits(streams=2, window=4, piece_bytes=2**20)
# Per connection; more hides no more of the way there and back.
_LENT_AT_ONCE = 4


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
        tls: MakeContext | None = None,
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

    @property
    def path(self) -> str:
        return self.lender.path

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
        self._turns = asyncio.Semaphore(_LENT_AT_ONCE)
        self._taken: dict[int, asyncio.Event] = {}

    def arrived(self, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.TAKEN and frame.request in self._taken:
            self._taken[frame.request].set()
        else:
            super().arrived(link, frame)

    def check_way(self) -> None:
        self._carried.lender.check_peer(is_near=self.link.is_near)

    async def send_piece(self, data: Data, payload_sum: int, moved: Callable[[], None]) -> None:
        """Lend one piece; an empty one goes with its frame.

        The session ends the connection if this takes too long, because all that was lent before is not taken.
        """
        if not data.payload:
            await super().send_piece(data, payload_sum, moved)
            return
        server = self._carried
        with server.waits.waiting("room to lend a piece", f"a peer of {server.name}", server.limits.stall_s):
            await self._turns.acquire()
            lent = asyncio.Event()
            self._spawn(self._lend(data, payload_sum, lent))
            await lent.wait()

    async def _lend(self, data: Data, payload_sum: int, lent: asyncio.Event) -> None:
        """One piece, from the time there is room for it until it was taken."""
        server = self._carried
        taken = self._taken[data.request] = asyncio.Event()
        try:
            async with self._open_giver().lend(data.payload) as place:
                message = Lent(data.request, data.offset, data.size, len(data.payload), payload_sum, place)
                self.link.send(to_frame(message))
                lent.set()
                await server.waits.within(
                    taken.wait(),
                    "a piece to be taken",
                    f"a peer of {server.name}",
                    server.limits.stall_s,
                    boundary="transfer",
                )
        except RoseError as error:
            logger("transfer").info("peer dropped", server=server.name, why=str(error))
            self.end()
        finally:
            del self._taken[data.request]
            self._turns.release()

    def _open_giver(self) -> Giver:
        if self._giver is None:
            self._giver = self._carried.lender.giver()
            self.link.send(to_frame(Offer(self._giver.offer)))
        return self._giver

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
        tls: MakeContext | None = None,
        limits: ClientLimits = _PIECES,
    ) -> None:
        self._borrower = borrower
        super().__init__(host, port, token=token, waits=waits, tls=tls, limits=limits)
        self._takers = ThreadPoolExecutor(limits.streams, thread_name_prefix="rose-take")

    @property
    def path(self) -> str:
        return self._borrower.path

    def _make_dialed(self, number: int, lane: Lane) -> Dialed:
        path = _Path(self._borrower, self._takers, self._waits, self._server, self._limits)
        return _CarriedDialed(number, lane, self, path)

    async def close(self) -> None:
        await super().close()
        # Not waited for: every taker was cut, and ends by itself.
        self._takers.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Path:
    """What a connection needs of its client to take pieces."""

    borrower: Borrower
    threads: ThreadPoolExecutor
    waits: WaitBoard
    server: str
    limits: ClientLimits


class _CarriedDialed(Dialed):
    def __init__(self, number: int, lane: Lane, owner: DialedOwner, path: _Path) -> None:
        super().__init__(number, lane, owner)
        self._path = path
        self._taker: Taker | None = None
        self._lent: deque[Lent] = deque()
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
        if self._taker is None or len(self._lent) >= self._path.limits.window:
            raise ProtocolError("received a piece out of turn")
        self.heard(link)
        self._lent.append(lent)
        if self._taking is None:
            self._taking = self.lane.loop.create_task(self._take_all(link, self._taker))
            self._taking.add_done_callback(partial(self._taking_done, link))

    async def _take_all(self, link: Link, taker: Taker) -> None:
        try:
            while self._lent:
                await self._take(link, taker, self._lent[0])
                link.send(to_frame(Taken(self._lent.popleft().request)))
        except RoseError as error:
            self._break(link, str(error))
        self._taking = None

    def _taking_done(self, link: Link, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A path that breaks its contract costs its connection, never the client.
            logger("transfer").error("taking failed", server=self._path.server, error=repr(error))
            self._break(link, repr(error))

    async def _take(self, link: Link, taker: Taker, lent: Lent) -> None:
        path = self._path
        stall_s = path.limits.stall_s
        work = self.lane.loop.run_in_executor(path.threads, taker.take, lent, stall_s)
        # The taker keeps the deadline; this is for a thread that never gets free.
        bytes_ = await path.waits.within(
            work, "a piece beside the connection", path.server, 2 * stall_s, boundary="transfer"
        )
        if xxhash.xxh3_64_intdigest(bytes_) != lent.payload_sum:
            raise ProtocolError("took a piece that does not match its checksum")
        self._put(link, lent, bytes_)

    def _put(self, link: Link, lent: Lent, bytes_: memoryview) -> None:
        room = self.place(link, Header(Kind.DATA, lent.request, lent.offset, lent.size, lent.length))
        if room is not None:
            room[:] = bytes_
        payload = bytes(bytes_) if room is None else room
        super().arrived(link, to_frame(Data(lent.request, lent.offset, lent.size, payload)))

    def _break(self, link: Link, why: str) -> None:
        link.abort()
        self.ended(link, why)

    def ended(self, link: Link, why: str, mismatch: Mismatch | None = None) -> None:
        self._cut_taker()
        super().ended(link, why, mismatch)

    def _abort(self) -> None:
        self._cut_taker()
        super()._abort()

    def _cut_taker(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        if self._taker is not None:
            self._taker.cut()
