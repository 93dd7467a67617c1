"""Frames on one connection: how they are written, and a decoder that reads the network and believes nothing.

Invariants
- A decoder yields exactly the frames that its peer's encoder made, in order, or raises FrameError; after that it
  raises the same error for ever. There is no resynchronising: the connection is dropped and its requests asked again.
- Frames are numbered from 0 on each connection, so one that is lost, repeated or out of turn is found.
- What does not begin as a frame is refused with its first wrong byte: who speaks another protocol may wait for us.
- The header has its own checksum and is verified before a byte of its payload is awaited or put anywhere, so a
  payload may be received straight into the place it is meant for. What is there counts only once its frame came out.
- Memory is bounded before it is taken: each kind has its longest payload, and a side accepts only its own kinds.

Header, 56 bytes, little-endian:

    magic 4s "RoSE" | version u8 | kind u8 | reserved u16 = 0 | request u32 | length u32 of the payload |
    sequence u64 | offset u64 | size u64 | XXH3-64 of the payload | XXH3-64 of the 48 bytes before

What `request`, `offset`, `size` and the payload mean depends on the kind, see `messages`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NoReturn

import xxhash

from rose.errors import TransferError

MAGIC = b"RoSE"
WIRE_VERSION = 2
PIECE_BYTES_MAX = 4 * 2**20
_FIELDS = struct.Struct("<4sBBHIIQQQQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size


class Kind(IntEnum):
    """What a frame is; see `messages`."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    GET = 4
    DATA = 5
    WATCH = 6
    NEWS = 7
    LOCATE = 8
    PLACE = 9
    FAIL = 10
    BUSY = 11
    OFFER = 12
    LENT = 13
    TAKEN = 14
    KNOCK = 15


PAYLOAD_BYTES_MAX: Mapping[Kind, int] = {
    Kind.CHALLENGE: 32,
    Kind.HELLO: 64,
    Kind.WELCOME: 32,
    Kind.GET: 200,
    Kind.DATA: PIECE_BYTES_MAX,
    Kind.WATCH: 0,
    Kind.NEWS: 200,
    Kind.LOCATE: 200,
    Kind.PLACE: 4096,
    Kind.FAIL: 400,
    Kind.BUSY: 0,
    Kind.OFFER: 2**16,
    Kind.LENT: 24,
    Kind.TAKEN: 0,
    Kind.KNOCK: 20,
}
FROM_SERVER = frozenset(
    {
        Kind.CHALLENGE,
        Kind.WELCOME,
        Kind.DATA,
        Kind.NEWS,
        Kind.PLACE,
        Kind.FAIL,
        Kind.BUSY,
        Kind.OFFER,
        Kind.LENT,
    }
)
FROM_CLIENT = frozenset(Kind) - FROM_SERVER


class FrameFault(StrEnum):
    """What is wrong with the bytes of a peer."""

    MAGIC = "not a frame"
    VERSION = "another version of the protocol"
    HEADER = "a header that does not match its checksum"
    KIND = "a kind of frame that is unknown or not this side's to send"
    RESERVED = "reserved bits that are set"
    LENGTH = "a payload longer than its kind may have"
    SEQUENCE = "a frame that is repeated, missing or out of turn"
    PAYLOAD = "a payload that does not match its checksum"
    TRUNCATED = "an end in the middle of a frame"


class FrameError(TransferError):
    """A peer sent what is no frame; `fault` says why. Its connection is of no more use.

    `opening` is how the connection began, if this was to be its first frame, and None otherwise.
    """

    def __init__(self, fault: FrameFault, opening: bytes | None) -> None:
        super().__init__(f"received {fault.value}")
        self.fault = fault
        self.opening = opening


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `payload` of a decoded frame may be the very memory it was placed in."""

    kind: Kind
    request: int = 0
    offset: int = 0
    size: int = 0
    payload: bytes | bytearray | memoryview = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header, verified; its payload of `length` bytes is yet to come."""

    kind: Kind
    request: int
    offset: int
    size: int
    length: int


class Encoder:
    """Numbers and seals the frames that one side sends on one connection."""

    def __init__(self) -> None:
        self._sequence = 0

    def header(self, frame: Frame, payload_sum: int | None = None) -> bytes:
        """The header to send ahead of `frame.payload`; takes the payload's XXH3-64 if it is known already."""
        length = len(frame.payload)
        if length > PAYLOAD_BYTES_MAX[frame.kind]:
            raise ValueError(f"{frame.kind.name} with {length} bytes, at most {PAYLOAD_BYTES_MAX[frame.kind]}")
        if payload_sum is None:
            payload_sum = xxhash.xxh3_64_intdigest(frame.payload)
        fields = _FIELDS.pack(
            MAGIC, WIRE_VERSION, frame.kind, 0, frame.request, length, self._sequence, frame.offset, frame.size,
            payload_sum,
        )  # fmt: skip
        self._sequence += 1
        return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))

    def encode(self, frame: Frame) -> bytes:
        """The whole frame as bytes."""
        return self.header(frame) + bytes(frame.payload)


class Decoder:
    """Reads the frames of one connection: receive into `room()`, then say how much with `advance`.

    `accepts` are the kinds that the peer may send. `place` is asked, once a DATA header is verified, where its
    payload shall go; None, or no `place`, means memory of the decoder's own.
    """

    def __init__(self, accepts: frozenset[Kind], place: Callable[[Header], memoryview | None] | None = None) -> None:
        self._accepts = accepts
        self._place = place
        self._sequence = 0
        self._error: FrameError | None = None
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._header: Header | None = None
        self._payload_sum = 0
        self._target = self._head
        self._filled = 0
        self._hash = xxhash.xxh3_64()

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        self._raise_if_over()
        return self._target[self._filled :]

    def advance(self, count: int) -> Frame | None:
        """`count` bytes were written to `room()`. Returns a frame if they completed one.

        Raises FrameError.
        """
        self._raise_if_over()
        if self._header is not None:
            # Summed as they come, while they are still in the processor's cache.
            self._hash.update(self._target[self._filled : self._filled + count])
        self._filled += count
        if self._filled < len(self._target):
            if self._header is None:
                self._check_magic()
            return None
        if self._header is None:
            header = self._open_header()
            if header.length:
                return None
        return self._close_frame()

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Take bytes from elsewhere. Raises FrameError; frames completed by the same bytes before it are lost."""
        frames = []
        view = memoryview(data)
        while view:
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            frame = self.advance(count)
            if frame is not None:
                frames.append(frame)
        return frames

    def end(self) -> None:
        """The peer closed the connection. Raises FrameError if that cut a frame."""
        self._raise_if_over()
        if self._header is not None or self._filled:
            self._fail(FrameFault.TRUNCATED)

    def _check_magic(self) -> None:
        if not MAGIC.startswith(bytes(self._head[: min(self._filled, len(MAGIC))])):
            self._fail(FrameFault.MAGIC)

    def _open_header(self) -> Header:
        fields = self._head[: _FIELDS.size]
        self._check_magic()
        _, version, kind, reserved, request, length, sequence, offset, size, payload_sum = _FIELDS.unpack(fields)
        if version != WIRE_VERSION:
            self._fail(FrameFault.VERSION)
        if _SUM.unpack(self._head[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
            self._fail(FrameFault.HEADER)
        if kind not in self._accepts:
            self._fail(FrameFault.KIND)
        if reserved:
            self._fail(FrameFault.RESERVED)
        if length > PAYLOAD_BYTES_MAX[Kind(kind)]:
            self._fail(FrameFault.LENGTH)
        if sequence != self._sequence:
            self._fail(FrameFault.SEQUENCE)
        header = Header(Kind(kind), request, offset, size, length)
        place = self._place(header) if self._place is not None and header.kind is Kind.DATA and length else None
        self._header = header
        self._payload_sum = payload_sum
        self._target = memoryview(bytearray(length)) if place is None else place
        self._filled = 0
        self._hash.reset()
        return header

    def _close_frame(self) -> Frame:
        header, payload = self._header, self._target
        if header is None or self._hash.intdigest() != self._payload_sum:
            self._fail(FrameFault.PAYLOAD)
        self._sequence += 1
        self._header = None
        self._target = self._head
        self._filled = 0
        return Frame(header.kind, header.request, header.offset, header.size, payload)

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, fault: FrameFault) -> NoReturn:
        first = not self._sequence and self._header is None
        self._error = FrameError(fault, bytes(self._head[: self._filled]) if first else None)
        self._target = self._head
        raise self._error
