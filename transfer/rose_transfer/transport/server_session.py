"""One connection as its server sees it. A pure core.

A request is a credit: the server sends what was asked for and never more, so a receiver bounds what is under way, and
a lost connection leaves nothing to clean up. Pieces are served one after another in the order asked.

Invariants
- Nothing is read, told or held for a peer that has not proved that it knows the token.
- Every request is answered exactly once, by DATA, NEWS, PLACE or FAIL, unless the connection closes first.
- At most `requests_max` requests are open; one more closes the connection.
- However long a peer asks to be kept waiting, what is called for later is due within a tick, a second or so.
- Whatever a peer sends, or does not, ends in an answer or in Close; nothing here raises for it.

State table

    state     HELLO                       GET, LOCATE, WATCH    anything else   Tick
    greeting  → proved, Enter; or FAIL    close                 close, but not  close after hello_s
              (TOKEN or PATH) and close                         for KNOCK
    proved    close                       close                 close
    ready     close                       served                close           BUSY, or close: idle, does not read
    closed    everything is ignored

Entered makes proved ready, with WELCOME; GiveWay closes either, with FAIL(FULL).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from rose.driver.core import After
from rose_transfer.transport import auth
from rose_transfer.transport.frames import Frame
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.messages import (
    Busy,
    Challenge,
    Fail,
    FailCode,
    Get,
    Hello,
    Knock,
    Locate,
    Message,
    News,
    Place,
    ProtocolError,
    Watch,
    Welcome,
    parse,
)
from rose_transfer.transport.mismatch import OTHER_TOKEN, Mismatch, of_paths


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a peer may cost. A connection holds at most two pieces of 4 MiB: one being read, one being sent."""

    hello_s: float = 5.0
    idle_s: float = 300.0
    stall_s: float = 20.0
    keepalive_s: float = 2.0
    requests_max: int = 64
    connections_max: int = 256
    """Of peers that have proved that they know the token, and as many that have yet to."""


@dataclass(frozen=True, slots=True)
class Began:
    """The connection is there."""


@dataclass(frozen=True, slots=True)
class Arrived:
    frame: Frame


@dataclass(frozen=True, slots=True)
class Entered:
    """There is room for who asked by Enter."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """There is no room for this peer, or no more; `why` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class PieceMoved:
    """A piece that was ordered by Serve begins to leave, or more of it has left."""

    request: int


@dataclass(frozen=True, slots=True)
class PieceSent:
    """Its DATA frame is with the network."""

    request: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A piece or place that was ordered cannot be had."""

    request: int
    code: FailCode
    text: str


@dataclass(frozen=True, slots=True)
class Located:
    request: int
    size_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Announced:
    newest: Announcement


@dataclass(frozen=True, slots=True)
class WatchOver:
    """The longest time that a watch may be held has passed."""

    request: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


ServerEvent: TypeAlias = (
    Began
    | Arrived
    | Entered
    | GiveWay
    | PieceMoved
    | PieceSent
    | RequestFailed
    | Located
    | Announced
    | WatchOver
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Enter:
    """The peer has proved that it knows the token: say Entered or GiveWay."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Read the piece and send it as DATA, after the pieces ordered before it; then say PieceSent or RequestFailed."""

    request: int
    key: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Find:
    """Find or make a file that holds the object; then say Located or RequestFailed."""

    request: int
    key: str


@dataclass(frozen=True, slots=True)
class Close:
    """Send what was sent so far, then close; `mismatch` if the two ends do not fit. Nothing more will be asked for."""

    why: str
    mismatch: Mismatch | None = None


ServerAction: TypeAlias = Send | Enter | Serve | Find | Close | After[ServerEvent]


class _State(StrEnum):
    GREETING = "greeting"
    PROVED = "proved"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """How much a connection is needed: least if nothing moves on it or is waited for, and the longer the less."""

    moving: bool
    watching: bool
    last_s: float


@dataclass(frozen=True, slots=True)
class _Wait:
    """For an announcement of `at_least` a version, until a time."""

    at_least: int
    until_s: float


class ServerSession:
    """`nonce` is 32 random bytes of this connection's own; only `local` peers are told of files.

    `path` is the name of what pieces cross by, beside the connection; empty if they cross on it.
    """

    def __init__(self, token: bytes, nonce: bytes, limits: ServerLimits, *, local: bool, path: str = "") -> None:
        self._token = token
        self._nonce = nonce
        self._limits = limits
        self._newest: Announcement | None = None
        self._local = local
        self._path = path
        # Told once the peer has proved itself, and has nothing more to say that a close would leave unread.
        self._misfit: Mismatch | None = None
        self._tick_s = min(limits.keepalive_s, limits.hello_s) / 2
        self._state = _State.GREETING
        self._client_nonce = b""
        self._last_request = 0
        self._ordered: set[int] = set()
        self._watches: dict[int, _Wait] = {}
        self._began_s = 0.0
        self._heard_s = 0.0
        self._said_s = 0.0
        self._moved_s: float | None = None

    @property
    def open_requests(self) -> int:
        return len(self._ordered) + len(self._watches)

    @property
    def client(self) -> bytes:
        """The same for all connections of one client, once it has proved that it knows the token."""
        return auth.mark_of(self._client_nonce)

    @property
    def use(self) -> Use:
        return Use(bool(self._ordered), bool(self._watches), max(self._heard_s, self._said_s))

    def step(self, event: ServerEvent, now: float) -> Sequence[ServerAction]:
        if self._state is _State.CLOSED:
            return ()
        match event:
            case Began():
                self._began_s = self._heard_s = self._said_s = now
                return [Send(Challenge(self._nonce)), self._tick_later()]
            case Arrived(frame):
                self._heard_s = now
                return self._take(frame, now)
            case Entered():
                self._state = _State.READY
                return [Send(Welcome(auth.server_proof(self._token, self._nonce, self._client_nonce)))]
            case GiveWay(why):
                return [Send(Fail(0, FailCode.FULL, why)), *self._close(why)]
            case PieceMoved():
                self._moved_s = now
                return ()
            case PieceSent(request):
                self._moved_s = None
                self._said_s = now
                self._ordered.discard(request)
                return ()
            case RequestFailed(request, code, text):
                return self._answer(Fail(request, code, text), now)
            case Located(request, size_bytes, path):
                return self._answer(Place(request, size_bytes, path), now)
            case Announced(newest):
                self._newest = newest
                due = [request for request, wait in self._watches.items() if newest.version >= wait.at_least]
                return [action for request in due for action in self._news(request, now)]
            case WatchOver(request):
                return self._news(request, now) if request in self._watches else ()
            case Tick():
                return [*self._tick(now), *self._ending(self._watches, now)]

    def _take(self, frame: Frame, now: float) -> Sequence[ServerAction]:
        try:
            message = parse(frame)
        except ProtocolError as error:
            return self._close(error.what)
        if self._state is _State.GREETING:
            if isinstance(message, Knock):
                self._misfit = None if message.path == self._path else of_paths(self._path, message.path)
                return ()
            return self._greet(message) if isinstance(message, Hello) else self._close("a request before hello")
        if self._state is _State.PROVED or not isinstance(message, Get | Watch | Locate):
            return self._close(f"{frame.kind.name} when requests are due")
        if message.request <= self._last_request:
            return self._close("request numbers that do not rise")
        if self.open_requests >= self._limits.requests_max:
            return self._close(f"more than {self._limits.requests_max} open requests")
        self._last_request = message.request
        return self._request(message, now)

    def _greet(self, hello: Hello) -> Sequence[ServerAction]:
        if not auth.same(hello.proof, auth.client_proof(self._token, self._nonce, hello.nonce)):
            refusal = Send(Fail(0, FailCode.TOKEN, "the token is wrong"))
            return [refusal, *self._close("a wrong token", OTHER_TOKEN)]
        if self._misfit is not None:
            refusal = Send(Fail(0, FailCode.PATH, self._misfit.what))
            return [refusal, *self._close("another path", self._misfit)]
        self._state = _State.PROVED
        self._client_nonce = hello.nonce
        return [Enter()]

    def _request(self, message: Get | Watch | Locate, now: float) -> Sequence[ServerAction]:
        match message:
            case Get(request, key, offset, length):
                self._ordered.add(request)
                return [Serve(request, key, offset, length)]
            case Locate(request, key):
                self._ordered.add(request)
                if not self._local:
                    return self._answer(Fail(request, FailCode.NOT_LOCAL, "this server is not on your host"), now)
                return [Find(request, key)]
            case Watch(request, at_least, wait_ms):
                self._watches[request] = _Wait(at_least, now + wait_ms / 1e3)
                if self._newest is not None and self._newest.version >= at_least:
                    return self._news(request, now)
                return self._ending([request], now)

    def _news(self, request: int, now: float) -> Sequence[ServerAction]:
        at_least = self._watches.pop(request).at_least
        fresh = self._newest is not None and self._newest.version >= at_least
        self._said_s = now
        return [Send(News(request, self._newest if fresh else None))]

    def _answer(self, answer: Fail | Place, now: float) -> Sequence[ServerAction]:
        self._ordered.discard(answer.request)
        self._said_s = now
        return [Send(answer)]

    def _tick(self, now: float) -> Sequence[ServerAction]:
        limits = self._limits
        if self._state is _State.GREETING:
            if now - self._began_s >= limits.hello_s:
                return self._close("no hello in time")
            return [self._tick_later()]
        if self._moved_s is not None:
            if now - self._moved_s >= limits.stall_s:
                return self._close("a peer that does not read")
        elif self.open_requests:
            if now - self._said_s >= limits.keepalive_s:
                self._said_s = now
                return [Send(Busy()), self._tick_later()]
        elif now - max(self._heard_s, self._said_s) >= limits.idle_s:
            return self._close("an idle peer")
        return [self._tick_later()]

    def _tick_later(self) -> After[ServerEvent]:
        return After(self._tick_s, Tick())

    def _ending(self, watches: Iterable[int], now: float) -> Sequence[ServerAction]:
        """The ends of watches that are due before the next tick."""
        left_s = {request: max(0.0, self._watches[request].until_s - now) for request in watches}
        return [After(each_s, WatchOver(request)) for request, each_s in left_s.items() if each_s <= self._tick_s]

    def _close(self, why: str, mismatch: Mismatch | None = None) -> Sequence[ServerAction]:
        self._state = _State.CLOSED
        self._watches.clear()
        return [Close(why, mismatch)]
