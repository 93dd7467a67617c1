"""The server behind every transport that runs over streams: accepts, steps a session for each peer, reads pieces.

Invariants
- Each connection has a `ServerSession` that decides; what it orders is performed here, and what came of it told.
- A peer can cost at most what `ServerLimits` says, and nothing that it does ends the server or another connection.
- Objects are read in threads of the server's own, so a slow disk holds up neither the loop nor other sources.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xxhash

from rose.driver.core import After
from rose.errors import ClusterError, ContractError, RoseError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_transfer.transport.auth import checked_token
from rose_transfer.transport.frames import FROM_CLIENT, PIECE_BYTES_MAX, Frame, Header
from rose_transfer.transport.interface import Announcement, ObjectSource, PreparingSource, ReadableObject
from rose_transfer.transport.link import Link, LinkEnded
from rose_transfer.transport.messages import Data, Fail, FailCode, to_frame
from rose_transfer.transport.mismatch import Mismatch
from rose_transfer.transport.server_session import (
    Announced,
    Arrived,
    Began,
    Close,
    Find,
    Located,
    PieceMoved,
    PieceSent,
    RequestFailed,
    Send,
    Serve,
    ServerEvent,
    ServerLimits,
    ServerSession,
)
from rose_transfer.transport.token_bucket import TokenBucket

_READ_S = 30.0
# A way that is checked reads every object that it leads over: a model of 1 TB at 300 MB/s.
_PREPARE_S = 3600.0
_READERS = 4
_OPEN_OBJECTS = 4
_CLOSE_S = 1.0
_TOLD_MAX = 256


class StreamServer(ABC):
    """Serves the objects of `source` to whoever knows `token`. Used from one event loop.

    `bandwidth_bytes_per_s` caps what all peers together are sent. `name` is what waits and logs call it.
    """

    def __init__(
        self,
        source: ObjectSource,
        *,
        token: str,
        waits: WaitBoard,
        name: str,
        bandwidth_bytes_per_s: float | None,
        limits: ServerLimits,
    ) -> None:
        self.source = source
        self.waits = waits
        self.name = name
        self.limits = limits
        self.bucket = TokenBucket(bandwidth_bytes_per_s, PIECE_BYTES_MAX) if bandwidth_bytes_per_s else None
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="rose-read")
        self.token = checked_token(token)
        self.newest: Announcement | None = None
        self._peers: set[Peer] = set()
        self._told: set[tuple[str, str]] = set()
        self._server: asyncio.Server | None = None
        self._closed = False

    @abstractmethod
    async def _listen(self, make_link: Callable[[], Link]) -> asyncio.Server:
        """Bind. Raises OSError."""

    def find(self, key: str) -> tuple[int, str]:
        """Size and path of a file that holds the object. Called in a reader thread. Raises RoseError or OSError."""
        raise ContractError(f"{self.name} hands over no files")

    async def prepare(self, key: str) -> None:
        """Have the source make an object that is made when it is asked for. Raises RoseError."""
        if isinstance(self.source, PreparingSource):
            preparing = self.source.prepare(key)
            await self.waits.within(preparing, f"{key} to be made", "the store", _PREPARE_S, boundary="transfer")

    @property
    def local(self) -> bool:
        """Whether peers may ask for files."""
        return False

    @property
    def connections(self) -> int:
        return len(self._peers)

    async def start(self) -> None:
        """Raises ClusterError if the address cannot be bound."""
        try:
            self._server = await self._listen(lambda: self.make_peer().link)
        except OSError as error:
            raise ClusterError(
                f"{self.name} cannot listen: {error}", to_do="choose another address or end who holds it"
            ) from error

    def announce(self, newest: Announcement) -> None:
        """Raises ContractError if the version does not rise."""
        if self.newest is not None and newest.version <= self.newest.version:
            raise ContractError(f"announced {newest} after {self.newest}", expected="rising versions")
        self.newest = newest
        for peer in tuple(self._peers):
            peer.step(Announced(newest))

    async def close(self) -> None:
        """Cut every connection. Receivers try again until their own deadline."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        ending = [task for peer in tuple(self._peers) for task in peer.end()]
        if ending:
            with self.waits.waiting("end of its peers", self.name, _CLOSE_S):
                await asyncio.wait(ending, timeout=_CLOSE_S)
        # Not cancelled: the objects that the peers had open are closed there.
        self.readers.shutdown(wait=False)

    def tell_of(self, mismatch: Mismatch, peer: str) -> None:
        """Log that a client is turned away: as a warning once for each host and reason, since clients try again."""
        said = (peer.rpartition(":")[0], mismatch.what)
        known = said in self._told or len(self._told) == _TOLD_MAX
        self._told |= set() if known else {said}
        say = logger("transfer").info if known else logger("transfer").warning
        say("peer does not fit", server=self.name, peer=peer, why=mismatch.what, to_do=mismatch.to_do)

    def make_peer(self) -> Peer:
        """What stands for one connection."""
        return Peer(self)

    def admit(self, peer: Peer) -> bool:
        if self._closed or len(self._peers) >= self.limits.connections_max:
            return False
        self._peers.add(peer)
        return True

    def leave(self, peer: Peer) -> None:
        self._peers.discard(peer)


class Peer:
    """One connection: a session, its link, and the task that sends its pieces one after another."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server
        self._session = ServerSession(server.token, secrets.token_bytes(32), server.limits, local=server.local)
        self._loop = asyncio.get_running_loop()
        # Bounded by the session, which never has more orders open than `requests_max`.
        self._orders: asyncio.Queue[Serve] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._objects: dict[str, ReadableObject] = {}
        self._objects_lock = threading.Lock()
        self._over = False
        self.link = Link(self, FROM_CLIENT)

    def step(self, event: ServerEvent) -> None:
        if self._over:
            return
        for action in self._session.step(event, self._loop.time()):
            match action:
                case Send(message):
                    self.link.send(to_frame(message))
                case Serve():
                    self._orders.put_nowait(action)
                case Find():
                    self._spawn(self._find(action))
                case Close(why, mismatch):
                    self._tell(why, mismatch)
                    self._leave()
                    self.link.close()
                case After(delay_s, later):
                    self._loop.call_later(delay_s, self.step, later)

    def opened(self, link: Link) -> None:
        if not self._server.admit(self):
            link.send(to_frame(Fail(0, FailCode.FULL, "too many connections")))
            self._over = True
            link.close()
            return
        self._spawn(self._send_pieces())
        self.step(Began())
        if self._server.newest is not None:
            self.step(Announced(self._server.newest))

    def arrived(self, link: Link, frame: Frame) -> None:
        self.step(Arrived(frame))

    def heard(self, link: Link) -> None:
        """A client's frames are short."""

    def ended(self, link: Link, why: str, mismatch: Mismatch | None) -> None:
        if mismatch is not None:
            self._tell(why, mismatch)
        self._leave()

    def place(self, link: Link, header: Header) -> memoryview | None:
        return None

    def _tell(self, why: str, mismatch: Mismatch | None) -> None:
        if mismatch is None:
            logger("transfer").info("peer dropped", server=self._server.name, why=why)
        else:
            self._server.tell_of(mismatch, self.link.peer)

    def end(self) -> tuple[asyncio.Task[None], ...]:
        """Cut the connection. Returns the tasks that were cancelled with it."""
        tasks = tuple(self._tasks)
        self._leave()
        self.link.abort()
        return tasks

    def _leave(self) -> None:
        if self._over:
            return
        self._over = True
        self._server.leave(self)
        for task in tuple(self._tasks):
            task.cancel()
        self._server.readers.submit(self._close_objects)

    def _close_objects(self) -> None:
        # A cancelled task does not stop the thread that reads for it: its descriptor must not be closed under it.
        with self._objects_lock:
            for readable in self._objects.values():
                readable.close()
            self._objects.clear()

    async def _send_pieces(self) -> None:
        server = self._server
        while True:
            order = await self._orders.get()
            try:
                await server.prepare(order.key)
                reading = self._loop.run_in_executor(server.readers, self._read, order)
                data, payload_sum = await server.waits.within(
                    reading, f"piece of {order.key}", "the store", _READ_S, boundary="transfer"
                )
            except (RoseError, OSError) as error:
                self.step(_failure(order, error))
                continue
            if server.bucket is not None:
                await self._bandwidth(server.bucket, len(data.payload))
            moved = PieceMoved(order.request)
            self.step(moved)
            try:
                await self.send_piece(data, payload_sum, partial(self.step, moved))
            except LinkEnded:
                return
            self.step(PieceSent(order.request))

    async def send_piece(self, data: Data, payload_sum: int, moved: Callable[[], None]) -> None:
        """Send one piece; see `link.Link.send_piece`. Raises LinkEnded."""
        await self.link.send_piece(
            to_frame(data),
            payload_sum,
            moved,
            waits=self._server.waits,
            whom=f"a peer of {self._server.name}",
            stall_s=self._server.limits.stall_s,
        )

    async def _bandwidth(self, bucket: TokenBucket, size_bytes: int) -> None:
        delay_s = bucket.take(size_bytes, self._loop.time())
        if delay_s:
            with self._server.waits.waiting("its share of the bandwidth", f"a peer of {self._server.name}", delay_s):
                await asyncio.sleep(delay_s)

    def _read(self, order: Serve) -> tuple[Data, int]:
        """In a reader thread."""
        with self._objects_lock:
            readable = self._opened(order.key)
            size = readable.size_bytes
            if order.offset > size:
                raise _Unable(FailCode.RANGE, f"{order.key} has {size} bytes, asked for offset {order.offset}")
            length = min(order.length, size - order.offset)
            payload = readable.read_at(order.offset, length)
        if len(payload) != length:
            raise _Unable(FailCode.UNREADABLE, f"{order.key} ended after {order.offset + len(payload)} of {size} bytes")
        return Data(order.request, order.offset, size, payload), xxhash.xxh3_64_intdigest(payload)

    def _opened(self, key: str) -> ReadableObject:
        if self._over:
            raise _Unable(FailCode.UNREADABLE, "the peer has left")
        if key not in self._objects:
            _must_exist(self._server.source, key)
            while len(self._objects) >= _OPEN_OBJECTS:
                self._objects.pop(next(iter(self._objects))).close()
            self._objects[key] = self._server.source.open(key)
        return self._objects[key]

    async def _find(self, order: Find) -> None:
        def find() -> tuple[int, str]:
            _must_exist(self._server.source, order.key)
            return self._server.find(order.key)

        try:
            await self._server.prepare(order.key)
            finding = self._loop.run_in_executor(self._server.readers, find)
            size_bytes, path = await self._server.waits.within(
                finding, f"file of {order.key}", "the store", _READ_S, boundary="transfer"
            )
            self.step(Located(order.request, size_bytes, path))
        except (RoseError, OSError) as error:
            self.step(_failure(order, error))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A source that breaks its contract costs the peer its connection, never the server.
            logger("transfer").error("serving failed", server=self._server.name, error=repr(error))
            self.end()


class _Unable(RoseError):
    """A request that cannot be met, and the code that says so."""

    def __init__(self, code: FailCode, what: str) -> None:
        super().__init__(what)
        self.code = code


def _must_exist(source: ObjectSource, key: str) -> None:
    if not source.has(key):
        raise _Unable(FailCode.MISSING, f"there is no object {key}")


def _failure(order: Serve | Find, error: RoseError | OSError) -> RequestFailed:
    code = error.code if isinstance(error, _Unable) else FailCode.UNREADABLE
    what = error.what if isinstance(error, RoseError) else f"{order.key} cannot be read: {error.strerror}"
    return RequestFailed(order.request, code, what)
