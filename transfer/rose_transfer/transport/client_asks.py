"""What one client wants of its server, over whichever links there are. Pure; a part of `client_session`.

Invariants
- Every ask ends in exactly one of Fetched, Told, Found, Failed, or in the asker's Cancelled.
- Fetched is said only when every piece landed, each by a sound DATA frame that was asked for on that very link.
- On all links together a piece is under way at most once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.errors import TransferError
from rose_transfer.transport.client_events import (
    ClientAction,
    Failed,
    FetchAsked,
    Fetched,
    Found,
    Grown,
    LocateAsked,
    Told,
    WatchAsked,
)
from rose_transfer.transport.client_state import Asked, CallState, FetchState, LinkBook
from rose_transfer.transport.interface import ObjectMissing
from rose_transfer.transport.messages import (
    Busy,
    Data,
    Fail,
    FailCode,
    Get,
    Locate,
    Message,
    News,
    Place,
    ProtocolError,
    Watch,
)
from rose_transfer.transport.piece_list import PieceList


class Asks:
    """Those that are open, by their numbers; objects are cut into pieces of `piece_bytes`."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._fetches: dict[int, FetchState] = {}
        self._calls: dict[int, CallState] = {}
        self._calls_to_send: list[int] = []

    @property
    def open(self) -> bool:
        return bool(self._fetches or self._calls)

    def fetch(self, asked: FetchAsked) -> Sequence[ClientAction]:
        pieces = PieceList(asked.resume_from, self._piece_bytes, asked.size_bytes)
        self._fetches[asked.ask] = FetchState(asked.key, pieces)
        return self._end_if_done(asked.ask)

    def call(self, asked: WatchAsked | LocateAsked, until_s: float) -> None:
        self._calls[asked.ask] = CallState(asked, until_s)
        self._calls_to_send.append(asked.ask)

    def under_way(self, link: LinkBook, request: int) -> Asked | None:
        """What was asked for by a request; None if nothing was, or nobody waits any more."""
        ask, offset = link.pieces.get(request, (0, 0))
        fetch = self._fetches.get(ask)
        if fetch is None:
            return None
        return Asked(ask, offset, fetch.pieces.length_at(offset), fetch.pieces.size_bytes)

    # What to ask for next

    def next_call(self, link: LinkBook, now: float) -> Watch | Locate | None:
        if not self._calls_to_send:
            return None
        ask = self._calls_to_send.pop(0)
        return link.call(ask, self._calls[ask], now)

    def has_next_piece(self) -> bool:
        return self._fetch_to_ask() is not None

    def next_piece(self, link: LinkBook, now: float) -> Get | None:
        ask = self._fetch_to_ask()
        return None if ask is None else link.next_piece(ask, self._fetches[ask], now)

    def _fetch_to_ask(self) -> int | None:
        """The oldest that has a piece which is not under way."""
        return next((ask for ask, fetch in self._fetches.items() if fetch.pieces.has_next()), None)

    # What is answered

    def answer(self, link: LinkBook, message: Message) -> Sequence[ClientAction]:
        """Raises ProtocolError for what nobody asked for on this link."""
        match message:
            case Data():
                return self._land(link, message)
            case Fail(request, code, text) if request in link.pieces:
                ask, _ = link.pieces.pop(request)
                return self._fail(ask, _error(code, text))
            case Fail(request, code, text) if request in link.calls:
                return self._fail(link.calls.pop(request), _error(code, text))
            case News(request, newest) if self._is_call(link, request, WatchAsked):
                ask = link.calls.pop(request)
                return [Told(ask, newest)] if self.forget(ask) else ()
            case Place(request, size, path) if self._is_call(link, request, LocateAsked):
                ask = link.calls.pop(request)
                return [Found(ask, size, path)] if self.forget(ask) else ()
            case Busy():
                return ()
        raise ProtocolError(f"received {type(message).__name__} that nobody asked for")

    def _is_call(self, link: LinkBook, request: int, kind: type[WatchAsked] | type[LocateAsked]) -> bool:
        if request not in link.calls:
            return False
        call = self._calls.get(link.calls[request])
        return call is None or isinstance(call.asked, kind)

    def _land(self, link: LinkBook, data: Data) -> Sequence[ClientAction]:
        if data.request not in link.pieces:
            raise ProtocolError("received a piece that nobody asked for")
        ask, offset = link.pieces[data.request]
        fetch = self._fetches.get(ask)
        if fetch is None:
            del link.pieces[data.request]
            return ()
        known = fetch.pieces.size_bytes
        if known not in (None, data.size):
            del link.pieces[data.request]
            return self._fail(ask, TransferError(f"{fetch.key} has {data.size} bytes, not {known}"))
        fetch.pieces.size_bytes = data.size
        if data.offset != offset or len(data.payload) != fetch.pieces.length_at(offset):
            raise ProtocolError("received a piece other than the one asked for")
        del link.pieces[data.request]
        grew = fetch.pieces.landed(offset, len(data.payload))
        return [*([Grown(ask, fetch.pieces.complete_bytes)] if grew else []), *self._end_if_done(ask)]

    def _end_if_done(self, ask: int) -> Sequence[ClientAction]:
        pieces = self._fetches[ask].pieces
        if not pieces.done or pieces.size_bytes is None:
            return ()
        del self._fetches[ask]
        return [Fetched(ask, pieces.size_bytes)]

    # How they end otherwise

    def forget(self, ask: int) -> bool:
        """Whether somebody still waited. Answers that are under way will be read past."""
        if ask in self._calls_to_send:
            self._calls_to_send.remove(ask)
        return self._fetches.pop(ask, None) is not None or self._calls.pop(ask, None) is not None

    def fail_all(self, error: TransferError) -> Sequence[ClientAction]:
        return [action for ask in (*self._fetches, *self._calls) for action in self._fail(ask, error)]

    def lost(self, link: LinkBook) -> None:
        """What was under way on it is asked for again, on any link."""
        for ask, offset in link.pieces.values():
            if ask in self._fetches:
                self._fetches[ask].pieces.lost(offset)
        self._calls_to_send.extend(ask for ask in link.calls.values() if ask in self._calls)

    def _fail(self, ask: int, error: TransferError) -> Sequence[ClientAction]:
        return [Failed(ask, error)] if self.forget(ask) else ()


def _error(code: FailCode, text: str) -> TransferError:
    return ObjectMissing(text) if code is FailCode.MISSING else TransferError(text)
