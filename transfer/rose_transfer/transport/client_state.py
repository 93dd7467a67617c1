"""What a client session keeps about its links and asks. See `client_session`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rose_transfer.transport.client_events import LocateAsked, WatchAsked
from rose_transfer.transport.messages import WAIT_MS_MAX, Get, Locate, Watch
from rose_transfer.transport.piece_list import PieceList


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """`streams` links carry up to `window` pieces each; their product bounds what a long fat link can hold.

    A link beyond the first is given up after `spare_s` without use, and tried again as late if the server had no room.
    """

    streams: int = 4
    window: int = 4
    piece_bytes: int = 2**21
    greet_s: float = 5.0
    stall_s: float = 20.0
    retry_s: float = 0.1
    retry_s_max: float = 2.0
    spare_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A piece under way: `length` bytes from `offset` of `ask`'s object; shorter at an end that is not known yet."""

    ask: int
    offset: int
    length: int
    size_bytes: int | None


class LinkState(StrEnum):
    CONNECTING = "connecting"
    GREETING = "greeting"
    PROVING = "proving"
    READY = "ready"


@dataclass(slots=True)
class FetchState:
    key: str
    pieces: PieceList


@dataclass(slots=True)
class CallState:
    """A watch or a search: one request, one answer."""

    asked: WatchAsked | LocateAsked
    until_s: float


@dataclass(slots=True)
class LinkBook:
    """A link, and what is open on it."""

    since_s: float
    heard_s: float
    nonce: bytes
    state: LinkState = LinkState.CONNECTING
    expected_proof: bytes = b""
    requests: int = 0
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)

    @property
    def open(self) -> int:
        return len(self.pieces) + len(self.calls)

    def call(self, ask: int, call: CallState, now: float) -> Watch | Locate:
        """The request for the answer to a watch or a search."""
        self._open_request(now)
        self.calls[self.requests] = ask
        match call.asked:
            case WatchAsked(_, at_least, _):
                wait_ms = int(1e3 * max(0.0, call.until_s - now))
                return Watch(self.requests, at_least, min(WAIT_MS_MAX, wait_ms))
            case LocateAsked(_, key):
                return Locate(self.requests, key)

    def next_piece(self, ask: int, fetch: FetchState, now: float) -> Get:
        """The request for the next piece of a fetch that has one."""
        self._open_request(now)
        offset, length = fetch.pieces.take()
        self.pieces[self.requests] = (ask, offset)
        return Get(self.requests, fetch.key, offset, length)

    def _open_request(self, now: float) -> None:
        # Silence is counted from the first open request on; before it there was nothing to hear.
        if not self.open:
            self.heard_s = now
        self.requests += 1
