"""What the frames mean. Every field of a frame that its kind does not use must be empty.

    kind       from    request  offset     size       payload
    KNOCK      client  -        -          -          two ends of line, and the name of the path by which pieces are to
                                                      cross, or nothing: on the connection; it comes first, see below
    CHALLENGE  server  -        -          -          32 random bytes
    HELLO      client  -        -          -          32 random bytes, of which the first 16 are those of all
                                                      connections of the client; 32 bytes of proof (see `auth`)
    WELCOME    server  -        -          -          32 bytes of proof
    GET        client  number   in object  length     key; length 1 to 4 MiB, the answer may be shorter at the end
    DATA       server  as GET   as GET     of object  the bytes
    WATCH      client  number   version    wait_ms    - ; asks for an announcement of at least that version
    NEWS       server  as asked version    -          key of its manifest, or nothing: none in time
    LOCATE     client  number   -          -          key; on one host only
    PLACE      server  as asked -          of object  path of a file that holds the object
    FAIL       server  as asked code       -          why, for people; request 0 is about the whole connection
    BUSY       server  -        -          -          - ; still there, an open request takes its time
    OFFER      server  -        -          -          how pieces cross beside the connection, see `carrier`
    LENT       server  as GET   as GET     of object  length, XXH3-64 and place of a piece that crosses beside
    TAKEN      client  as LENT  -          -          - ; the piece was taken

Requests are numbered from 1 upwards on each connection.

A client knocks and a server challenges as soon as they are connected. Neither waits for the other: so a service of
another kind, whichever side it is on, is seen for what it is by what it answers, see `mismatch`. The ends of line are
for those that read lines.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from rose.errors import TransferError
from rose_transfer.transport.frames import PIECE_BYTES_MAX, Frame, Kind
from rose_transfer.transport.interface import Announcement, is_key

NONCE_BYTES = 32
PROOF_BYTES = 32
_FAIL_TEXT_BYTES = 400
WAIT_MS_MAX = 3_600_000
KNOCK = b"\r\n\r\n"


class ProtocolError(TransferError):
    """A peer sent a frame that is sound but means nothing, or not now."""


class FailCode(IntEnum):
    """Why a server does not do as asked."""

    MISSING = 1
    UNREADABLE = 2
    RANGE = 3
    TOKEN = 4
    FULL = 5
    NOT_LOCAL = 6
    TLS = 7
    PATH = 8


@dataclass(frozen=True, slots=True)
class Knock:
    path: str = ""


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    proof: bytes


@dataclass(frozen=True, slots=True)
class Get:
    request: int
    key: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Data:
    """`size` is the whole object's, in bytes."""

    request: int
    offset: int
    size: int
    payload: bytes | bytearray | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Watch:
    request: int
    at_least: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class News:
    request: int
    newest: Announcement | None


@dataclass(frozen=True, slots=True)
class Locate:
    request: int
    key: str


@dataclass(frozen=True, slots=True)
class Place:
    request: int
    size: int
    path: str


@dataclass(frozen=True, slots=True)
class Fail:
    request: int
    code: FailCode
    text: str


@dataclass(frozen=True, slots=True)
class Busy:
    pass


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client must know before the first LENT of a connection."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Lent:
    """As Data, but its `length` bytes with XXH3-64 `payload_sum` are to be taken from `place`."""

    request: int
    offset: int
    size: int
    length: int
    payload_sum: int
    place: int


@dataclass(frozen=True, slots=True)
class Taken:
    request: int


Message: TypeAlias = (
    Knock
    | Challenge
    | Hello
    | Welcome
    | Get
    | Data
    | Watch
    | News
    | Locate
    | Place
    | Fail
    | Busy
    | Offer
    | Lent
    | Taken
)
_LENT = struct.Struct("<QQQ")


def to_frame(message: Message) -> Frame:
    """The frame that carries a message."""
    match message:
        case Knock(path):
            return Frame(Kind.KNOCK, payload=KNOCK + path.encode())
        case Challenge(nonce):
            return Frame(Kind.CHALLENGE, payload=nonce)
        case Hello(nonce, proof):
            return Frame(Kind.HELLO, payload=nonce + proof)
        case Welcome(proof):
            return Frame(Kind.WELCOME, payload=proof)
        case Get(request, key, offset, length):
            return Frame(Kind.GET, request, offset, length, key.encode())
        case Data(request, offset, size, payload):
            return Frame(Kind.DATA, request, offset, size, payload)
        case Watch(request, at_least, wait_ms):
            return Frame(Kind.WATCH, request, at_least, wait_ms)
        case News(request, None):
            return Frame(Kind.NEWS, request)
        case News(request, Announcement(version, key)):
            return Frame(Kind.NEWS, request, version, payload=key.encode())
        case Locate(request, key):
            return Frame(Kind.LOCATE, request, payload=key.encode())
        case Place(request, size, path):
            return Frame(Kind.PLACE, request, size=size, payload=path.encode())
        case Fail(request, code, text):
            return Frame(Kind.FAIL, request, code, payload=text.encode()[:_FAIL_TEXT_BYTES])
        case Busy():
            return Frame(Kind.BUSY)
        case Offer(text):
            return Frame(Kind.OFFER, payload=text)
        case Lent(request, offset, size, length, payload_sum, place):
            return Frame(Kind.LENT, request, offset, size, _LENT.pack(length, payload_sum, place))
        case Taken(request):
            return Frame(Kind.TAKEN, request)
    raise ValueError(f"{message!r} is no message")


def parse(frame: Frame) -> Message:
    """The message that a frame carries. Raises ProtocolError."""
    message = _parse(frame)
    if message is None or not _is_plain(frame):
        raise ProtocolError(f"received a {frame.kind.name} frame that means nothing")
    return message


def _parse(frame: Frame) -> Message | None:
    request, offset, size, payload = frame.request, frame.offset, frame.size, frame.payload
    match frame.kind:
        case Kind.KNOCK:
            return _knock(bytes(payload))
        case Kind.CHALLENGE:
            return Challenge(bytes(payload)) if len(payload) == NONCE_BYTES else None
        case Kind.HELLO:
            whole = len(payload) == NONCE_BYTES + PROOF_BYTES
            return Hello(bytes(payload[:NONCE_BYTES]), bytes(payload[NONCE_BYTES:])) if whole else None
        case Kind.WELCOME:
            return Welcome(bytes(payload)) if len(payload) == PROOF_BYTES else None
        case Kind.GET:
            key = _key(payload)
            return Get(request, key, offset, size) if key and 0 < size <= PIECE_BYTES_MAX else None
        case Kind.DATA:
            return Data(request, offset, size, payload) if offset + len(payload) <= size else None
        case Kind.WATCH:
            return Watch(request, offset, size) if size <= WAIT_MS_MAX else None
        case Kind.NEWS:
            if not payload:
                return News(request, None) if not offset else None
            key = _key(payload)
            return News(request, Announcement(offset, key)) if key and offset < 2**63 else None
        case Kind.LOCATE:
            key = _key(payload)
            return Locate(request, key) if key else None
        case Kind.PLACE:
            path = _text(payload)
            return Place(request, size, path) if path and path.startswith("/") and "\0" not in path else None
        case Kind.FAIL:
            text = bytes(payload).decode(errors="replace")
            return Fail(request, FailCode(offset), text) if offset in _FAIL_CODES else None
        case Kind.BUSY:
            return Busy()
        case Kind.OFFER:
            return Offer(bytes(payload)) if payload else None
        case Kind.LENT:
            return _lent(frame) if len(payload) == _LENT.size else None
        case Kind.TAKEN:
            return Taken(request)


_FAIL_CODES = frozenset(code.value for code in FailCode)
# Which of (request, offset, size) a kind uses; FAIL may be about request 0.
_USES = {
    Kind.KNOCK: (False, False, False),
    Kind.CHALLENGE: (False, False, False),
    Kind.HELLO: (False, False, False),
    Kind.WELCOME: (False, False, False),
    Kind.GET: (True, True, True),
    Kind.DATA: (True, True, True),
    Kind.WATCH: (True, True, True),
    Kind.NEWS: (True, True, False),
    Kind.LOCATE: (True, False, False),
    Kind.PLACE: (True, False, True),
    Kind.FAIL: (True, True, False),
    Kind.BUSY: (False, False, False),
    Kind.OFFER: (False, False, False),
    Kind.LENT: (True, True, True),
    Kind.TAKEN: (True, False, False),
}


def _is_plain(frame: Frame) -> bool:
    has_request, has_offset, has_size = _USES[frame.kind]
    if has_request and not frame.request and frame.kind is not Kind.FAIL:
        return False
    unused = (frame.request, has_request), (frame.offset, has_offset), (frame.size, has_size)
    return not any(value and not used for value, used in unused)


def _knock(payload: bytes) -> Knock | None:
    path = _text(payload[len(KNOCK) :])
    if path is None or not payload.startswith(KNOCK):
        return None
    return Knock(path) if not path or (path.isascii() and path.isalnum()) else None


def _lent(frame: Frame) -> Lent | None:
    length, payload_sum, place = _LENT.unpack(frame.payload)
    if not 0 < length <= PIECE_BYTES_MAX or frame.offset + length > frame.size:
        return None
    return Lent(frame.request, frame.offset, frame.size, length, payload_sum, place)


def _text(payload: bytes | bytearray | memoryview) -> str | None:
    try:
        return bytes(payload).decode()
    except UnicodeDecodeError:
        return None


def _key(payload: bytes | bytearray | memoryview) -> str | None:
    text = _text(payload)
    return text if text is not None and is_key(text) else None
