"""One connection's bytes: received straight to where they belong, sent whole frames at a time. It decides nothing.

Invariants
- The owner hears `opened` once at most and `ended` exactly once after it; nothing after `ended`.
- Frames leave in the order in which they were given, except that what is given while a piece leaves waits behind it.
- Memory for sending is bounded: a piece is handed to the network a slice at a time, as the network takes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from rose.waits import WaitBoard
from rose_transfer.transport.frames import Decoder, Encoder, Frame, FrameError, Header, Kind
from rose_transfer.transport.mismatch import Mismatch, of_first_frame

SLICE_BYTES = 2**18
_HEARD_EVERY_S = 0.5
_FLUSH_S = 1.0


class LinkOwner(Protocol):
    def opened(self, link: Link) -> None: ...

    def arrived(self, link: Link, frame: Frame) -> None: ...

    def heard(self, link: Link) -> None:
        """Part of a long frame came; at most twice a second."""
        ...

    def ended(self, link: Link, why: str, mismatch: Mismatch | None) -> None: ...

    def place(self, link: Link, header: Header) -> memoryview | None:
        """See `frames.Decoder`."""
        ...


class LinkEnded(ConnectionError):
    """The connection went away while a piece was being sent."""


class Link(asyncio.BufferedProtocol):
    """Either side of a connection, for asyncio to drive."""

    def __init__(self, owner: LinkOwner, accepts: frozenset[Kind]) -> None:
        self._owner = owner
        self._decoder = Decoder(accepts, lambda header: owner.place(self, header))
        self._encoder = Encoder()
        self._transport: asyncio.Transport | None = None
        self._over = False
        self._heard_s = 0.0
        self._sending = False
        self._held: deque[Frame] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._loop = asyncio.get_running_loop()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._over:
            self._transport.abort()
            return
        # What the network does not take at once, asyncio copies: with no room for it, never more than one slice.
        # Not 0: over TLS, asyncio takes an empty buffer for one that has reached that, and pauses for ever.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._owner.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        # asyncio may hand over what it had read already after an abort; that goes nowhere.
        return memoryview(bytearray(SLICE_BYTES)) if self._over else self._decoder.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._over:
            return
        try:
            frame = self._decoder.advance(nbytes)
        except FrameError as error:
            self._end(error.what, of_first_frame(error))
            return
        if frame is not None:
            self._owner.arrived(self, frame)
        elif self._loop.time() - self._heard_s >= _HEARD_EVERY_S:
            self._heard_s = self._loop.time()
            self._owner.heard(self)

    def eof_received(self) -> None:
        if self._over:
            return
        try:
            self._decoder.end()
            self._end("closed by the other side")
        except FrameError as error:
            self._end(error.what)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"cut: {exc}" if exc else "closed")

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    # Called by the owner

    @property
    def peer(self) -> str:
        """The other side's address, empty where it has none."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""

    @property
    def is_near(self) -> bool:
        """Whether both sides have the same address, as two processes of one host do."""
        if self._transport is None:
            return False
        ends = (self._transport.get_extra_info("peername"), self._transport.get_extra_info("sockname"))
        return all(isinstance(end, tuple) for end in ends) and ends[0][0] == ends[1][0]

    def send(self, frame: Frame) -> None:
        """Send a small frame, behind a piece that is being sent."""
        transport = self._writable()
        if transport is None:
            return
        if self._sending:
            self._held.append(frame)
        else:
            transport.write(self._encoder.encode(frame))

    async def send_piece(
        self, frame: Frame, payload_sum: int, moved: Callable[[], None], *, waits: WaitBoard, whom: str, stall_s: float
    ) -> None:
        """Send a DATA frame as the network takes it; `moved` is called for each slice that it took.

        Whoever owns the link ends it if nothing moved for `stall_s`. Raises LinkEnded.
        """
        self._sending = True
        self._write(self._encoder.header(frame, payload_sum))
        payload = memoryview(frame.payload)
        for at in range(0, len(payload), SLICE_BYTES):
            moved()
            self._write(payload[at : at + SLICE_BYTES])
            if not self._room.is_set():
                with waits.waiting("a piece to be read", whom, stall_s):
                    await self._room.wait()
        self._sending = False
        while self._held:
            self.send(self._held.popleft())

    def close(self) -> None:
        """End the link once what was sent is with the network, within a second. The owner hears nothing more."""
        self._over = True
        self._room.set()
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(_FLUSH_S, self._transport.abort)

    def abort(self) -> None:
        """End the link now. The owner hears nothing more."""
        self._over = True
        self._room.set()
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes | memoryview) -> None:
        transport = self._writable()
        if transport is None:
            raise LinkEnded("the link ended while a piece was being sent")
        transport.write(data)

    def _writable(self) -> asyncio.Transport | None:
        # A write that finds the connection gone closes the transport at once, and says so only in a later turn of the
        # loop. What is written to it until then is thrown away, and asyncio complains on stderr.
        return None if self._over or self._transport is None or self._transport.is_closing() else self._transport

    def _end(self, why: str, mismatch: Mismatch | None = None) -> None:
        if not self._over:
            self.abort()
            self._owner.ended(self, why, mismatch)
