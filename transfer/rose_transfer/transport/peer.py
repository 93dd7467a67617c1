"""One connection of a server: a session that decides, its link, and the tasks that read and send for it.

Invariants
- What the session orders is performed here, and what came of it told.
- Pieces are read in the server's threads and sent one after another; what a peer has open is closed behind the last
  read of it.
- Nothing of a connection that has ended is called for later, so nothing of it stays.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from rose.driver.core import After
from rose.errors import RoseError
from rose.logs import logger
from rose_transfer.transport.frames import FROM_CLIENT, Frame, Header
from rose_transfer.transport.interface import ObjectSource, ReadableObject
from rose_transfer.transport.link import Link, LinkEnded
from rose_transfer.transport.messages import Data, Fail, FailCode, to_frame
from rose_transfer.transport.mismatch import Mismatch
from rose_transfer.transport.server_session import (
    Announced,
    Arrived,
    Began,
    Close,
    Enter,
    Find,
    Located,
    PieceMoved,
    PieceSent,
    RequestFailed,
    Send,
    Serve,
    ServerEvent,
    ServerSession,
)
from rose_transfer.transport.token_bucket import TokenBucket

if TYPE_CHECKING:
    from rose_transfer.transport.serving import StreamServer

_READ_S = 30.0
_OPEN_OBJECTS = 4


class Peer:
    """One connection: a session, its link, and the task that sends its pieces one after another."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server
        self.session = ServerSession(
            server.token, secrets.token_bytes(32), server.limits, local=server.local, path=server.path
        )
        self._loop = asyncio.get_running_loop()
        # Bounded by the session, which never has more orders open than `requests_max`.
        self._orders: asyncio.Queue[Serve] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: dict[ServerEvent, asyncio.TimerHandle] = {}
        self._objects: dict[str, ReadableObject] = {}
        self._objects_lock = threading.Lock()
        self._over = False
        self.link = Link(self, FROM_CLIENT)

    def step(self, event: ServerEvent) -> None:
        if self._over:
            return
        for action in self.session.step(event, self._loop.time()):
            match action:
                case Send(message):
                    self.link.send(to_frame(message))
                case Enter():
                    self._server.enter(self)
                case Serve():
                    self._orders.put_nowait(action)
                case Find():
                    self._spawn(self._find(action))
                case Close(why, mismatch):
                    self._tell(why, mismatch)
                    self._leave()
                    self.link.close()
                case After(delay_s, later):
                    self._call_later(delay_s, later)

    def _call_later(self, delay_s: float, event: ServerEvent) -> None:
        def due() -> None:
            del self._later[event]
            self.step(event)

        if event in self._later:
            self._later[event].cancel()
        self._later[event] = self._loop.call_later(delay_s, due)

    def opened(self, link: Link) -> None:
        if not self._server.admit(self):
            link.send(to_frame(Fail(0, FailCode.FULL, "too many at once have yet to say who they are")))
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
        for handle in self._later.values():
            handle.cancel()
        self._later.clear()
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
                self.check_way()
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

    def check_way(self) -> None:
        """Raises TransferError if pieces cannot cross to this peer."""

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
