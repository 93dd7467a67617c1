"""All connections of one client to one server, and what it wants of them. A pure core.

Fetches are cut into pieces; each piece is asked for on whichever link has the fewest under way, the oldest fetch
first. A link that is lost, silent or out of order costs exactly the pieces that were under way on it: they are asked
for again, on any link. One link is opened when something is asked for, and again, ever more patiently, as long as
somebody waits. How long that is, is the asker's to say: a session gives up only when it is refused.

Servers take so many connections and no more. So further links are opened only once there are more pieces to ask for
than the one has room for, they are given up when they have been idle, and a server that has no room for them is left
alone for as long.

Invariants
- Every ask ends in exactly one of Fetched, Told, Found, Failed, or in the asker's Cancelled.
- Fetched is said only when every piece landed, each by a sound DATA frame that was asked for on that very link.
- On a link at most `window` pieces are under way; on all links together a piece is under way at most once.
- Of several links that are idle, one is kept.
- Nothing is asked of a server that has not proved that it knows the token.
- What comes from a link that was dropped or lost changes nothing.

States of a link: connecting → (Connected) greeting → (CHALLENGE, HELLO sent) proving → (WELCOME) ready.
Anything out of turn drops it; so does silence: before ready for `greet_s`, then for `stall_s` while requests are open.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.driver.core import After
from rose.errors import TransferError
from rose_transfer.transport import auth
from rose_transfer.transport.client_events import (
    Arrived,
    Cancelled,
    ClientAction,
    ClientEvent,
    Connect,
    Connected,
    Drop,
    Failed,
    FetchAsked,
    Fetched,
    Found,
    Grown,
    Heard,
    LocateAsked,
    Lost,
    Misfits,
    Retry,
    Send,
    Tick,
    Told,
    WatchAsked,
)
from rose_transfer.transport.client_state import (
    Asked,
    CallState,
    ClientLimits,
    FetchState,
    LinkBook,
    LinkState,
)
from rose_transfer.transport.frames import Frame
from rose_transfer.transport.interface import ObjectMissing, Refused
from rose_transfer.transport.messages import (
    Busy,
    Challenge,
    Data,
    Fail,
    FailCode,
    Hello,
    Knock,
    Message,
    News,
    Place,
    ProtocolError,
    Welcome,
    parse,
)
from rose_transfer.transport.mismatch import LEFT_AT_SIGHT, OTHER_TOKEN, TLS_THERE_ONLY, Mismatch, of_paths
from rose_transfer.transport.piece_list import PieceList


class ClientSession:
    """`nonce_seed` is 32 random bytes: the draws for all links are derived from it, so that the core draws nothing.

    `path` is the name of what pieces cross by, beside the connection; empty if they cross on it. `over_tls` says that
    a link is connected once both have shaken hands.
    """

    def __init__(
        self, token: bytes, nonce_seed: bytes, limits: ClientLimits, path: str = "", over_tls: bool = False
    ) -> None:
        self._token = token
        self._path = path
        self._over_tls = over_tls
        self._nonce_seed = nonce_seed
        self._limits = limits
        self._links: dict[int, LinkBook] = {}
        self._links_made = 0
        self._fetches: dict[int, FetchState] = {}
        self._calls: dict[int, CallState] = {}
        self._calls_to_send: list[int] = []
        self._failures = 0
        self._rests = 0
        self._resting = False
        self._ticking = False
        self._welcomed = False
        self._misfits = 0
        self._misfit_told = False
        self.last_trouble = ""

    def asked(self, link: int, request: int) -> Asked | None:
        """What was asked for by a request that is open on a link; None if nothing was, or nobody waits any more."""
        known = self._links.get(link)
        ask, offset = (0, 0) if known is None else known.pieces.get(request, (0, 0))
        fetch = self._fetches.get(ask)
        if fetch is None:
            return None
        return Asked(ask, offset, fetch.pieces.length_at(offset), fetch.pieces.size_bytes)

    def step(self, event: ClientEvent, now: float) -> Sequence[ClientAction]:
        return [*self._take(event, now), *self._go_on(now)]

    def _take(self, event: ClientEvent, now: float) -> Sequence[ClientAction]:
        match event:
            case FetchAsked(ask, key, resume_from, size_bytes):
                pieces = PieceList(resume_from, self._limits.piece_bytes, size_bytes)
                self._fetches[ask] = FetchState(key, pieces)
                return self._end_if_done(ask)
            case WatchAsked(ask, _, wait_s):
                self._calls[ask] = CallState(event, now + wait_s)
                self._calls_to_send.append(ask)
            case LocateAsked(ask):
                self._calls[ask] = CallState(event, now)
                self._calls_to_send.append(ask)
            case Cancelled(ask):
                self._forget(ask)
            case Connected(link):
                if link in self._links:
                    self._links[link].state = LinkState.GREETING
                    return [Send(link, Knock(self._path))]
            case Heard(link):
                if link in self._links:
                    self._links[link].heard_s = now
            case Arrived(link, frame):
                if link in self._links:
                    return self._read(link, frame, now)
            case Lost(link, why, mismatch):
                if link in self._links:
                    if mismatch is None and self._over_tls and self._links[link].state is LinkState.GREETING:
                        mismatch = LEFT_AT_SIGHT
                    return [*self._lose(link, self._told(link, why, mismatch)), *self._judge(mismatch)]
            case Retry(rest):
                if rest == self._rests:
                    self._resting = False
            case Tick():
                self._ticking = False
                return [*self._drop_silent(now), *self._drop_spare(now)]
        return ()

    # What links say

    def _read(self, number: int, frame: Frame, now: float) -> Sequence[ClientAction]:
        link = self._links[number]
        link.heard_s = now
        try:
            message = parse(frame)
            if isinstance(message, Fail) and message.request == 0:
                return self._refused(number, message)
            return (
                self._greet(number, link, message) if link.state is not LinkState.READY else self._answer(link, message)
            )
        except ProtocolError as error:
            return self._drop(number, error.what)

    def _greet(self, number: int, link: LinkBook, message: Message) -> Sequence[ClientAction]:
        if link.state is LinkState.GREETING and isinstance(message, Challenge):
            link.state = LinkState.PROVING
            link.expected_proof = auth.server_proof(self._token, message.nonce, link.nonce)
            return [Send(number, Hello(link.nonce, auth.client_proof(self._token, message.nonce, link.nonce)))]
        if link.state is LinkState.PROVING and isinstance(message, Welcome):
            if not auth.same(message.proof, link.expected_proof):
                return [*self._drop(number, "a wrong proof"), *self._refuse("the server does not know our token")]
            link.state = LinkState.READY
            self._welcomed = True
            self._misfits = 0
            self._misfit_told = False
            self._failures = 0
            return ()
        raise ProtocolError(f"received {type(message).__name__} while {link.state.value}")

    def _refused(self, number: int, fail: Fail) -> Sequence[ClientAction]:
        dropped = self._drop(number, f"refused: {fail.text}", full=fail.code is FailCode.FULL)
        if fail.code is FailCode.TOKEN:
            return [*dropped, *self._refuse("the server does not accept our token")]
        if fail.code is FailCode.PATH:
            return [*dropped, *self._judge(of_paths(self._path))]
        return [*dropped, *self._judge(TLS_THERE_ONLY if fail.code is FailCode.TLS else None)]

    def _judge(self, mismatch: Mismatch | None) -> Sequence[ClientAction]:
        """Give up where another link would be no better.

        A server that has welcomed us before does fit: it, or what stands in for it just now, is tried again, and people
        are told. So is one whose first bytes may have been damaged, once.
        """
        if mismatch is None:
            return ()
        self._misfits += 1
        if self._misfit_told or (not mismatch.certain and self._misfits == 1):
            return ()
        if not self._welcomed:
            return self._refuse(mismatch.what, mismatch)
        self._misfit_told = True
        return [Misfits(mismatch)]

    def _answer(self, link: LinkBook, message: Message) -> Sequence[ClientAction]:
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
                return [Told(ask, newest)] if self._forget(ask) else ()
            case Place(request, size, path) if self._is_call(link, request, LocateAsked):
                ask = link.calls.pop(request)
                return [Found(ask, size, path)] if self._forget(ask) else ()
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

    # How asks and links end

    def _forget(self, ask: int) -> bool:
        """Whether somebody still waited. Answers that are under way will be read past."""
        if ask in self._calls_to_send:
            self._calls_to_send.remove(ask)
        return self._fetches.pop(ask, None) is not None or self._calls.pop(ask, None) is not None

    def _fail(self, ask: int, error: TransferError) -> Sequence[ClientAction]:
        return [Failed(ask, error)] if self._forget(ask) else ()

    def _refuse(self, why: str, mismatch: Mismatch = OTHER_TOKEN) -> Sequence[ClientAction]:
        asks = [*self._fetches, *self._calls]
        error = Refused(why, expected=mismatch.expected, to_do=mismatch.to_do)
        return [action for ask in asks for action in self._fail(ask, error)]

    def _told(self, number: int, why: str, mismatch: Mismatch | None) -> str:
        """How a link ended, for people."""
        if mismatch is not None:
            return mismatch.what
        ungreeted = self._links[number].state is LinkState.GREETING
        return f"{why}; it was connected and had not said a word: is a transfer server there?" if ungreeted else why

    def _drop(self, number: int, why: str, *, full: bool = False) -> Sequence[ClientAction]:
        return [Drop(number, why), *self._lose(number, why, full=full)]

    def _lose(self, number: int, why: str, *, full: bool = False) -> Sequence[ClientAction]:
        link = self._links.pop(number)
        self.last_trouble = why
        for ask, offset in link.pieces.values():
            if ask in self._fetches:
                self._fetches[ask].pieces.lost(offset)
        self._calls_to_send.extend(ask for ask in link.calls.values() if ask in self._calls)
        self._rests += 1
        self._resting = True
        return [After(self._rest_s(link, full=full), Retry(self._rests))]

    def _rest_s(self, lost: LinkBook, *, full: bool) -> float:
        """How long no link is opened after one was lost."""
        limits = self._limits
        if full and self._ready():
            return limits.spare_s
        rest_s = min(limits.retry_s_max, limits.retry_s * 2.0 ** min(self._failures, 16))
        # Of links that were ready several are lost at once, with their server, which may be back as soon.
        self._failures += lost.state is not LinkState.READY
        return rest_s

    def _ready(self) -> list[int]:
        return [number for number, link in self._links.items() if link.state is LinkState.READY]

    def _drop_silent(self, now: float) -> Sequence[ClientAction]:
        silent = [
            number
            for number, link in self._links.items()
            if (link.state is not LinkState.READY and now - link.since_s >= self._limits.greet_s)
            or (link.open and now - link.heard_s >= self._limits.stall_s)
        ]
        return [action for number in silent for action in self._drop(number, self._told(number, "silence", None))]

    def _drop_spare(self, now: float) -> Sequence[ClientAction]:
        ready = self._ready()
        idle = [
            number
            for number in ready
            if not self._links[number].open and now - self._links[number].heard_s >= self._limits.spare_s
        ]
        spare = idle[1:] if len(idle) == len(ready) else idle
        for number in spare:
            del self._links[number]
        return [Drop(number, "idle") for number in spare]

    # What to ask for next

    def _go_on(self, now: float) -> Sequence[ClientAction]:
        actions: list[ClientAction] = []
        while (request := self._next_request(now)) is not None:
            actions.append(request)
        while not self._resting and len(self._links) < self._wanted():
            actions.append(self._connect(now))
        if not self._ticking and (self._asking() or len(self._links) > 1):
            self._ticking = True
            limits = self._limits
            actions.append(After(min(limits.greet_s, limits.stall_s, limits.spare_s) / 4, Tick()))
        return actions

    def _asking(self) -> bool:
        return bool(self._fetches or self._calls)

    def _wanted(self) -> int:
        """How many links there should be at least."""
        if not self._ready():
            return int(self._asking())
        return self._limits.streams if self._fetch_to_ask() is not None else 1

    def _fetch_to_ask(self) -> int | None:
        return next((ask for ask, fetch in self._fetches.items() if fetch.pieces.has_next()), None)

    def _connect(self, now: float) -> Connect:
        self._links_made += 1
        number = self._links_made
        self._links[number] = LinkBook(now, now, auth.derived_nonce(self._nonce_seed, number))
        return Connect(number)

    def _next_request(self, now: float) -> Send | None:
        ready = self._ready()
        if not ready:
            return None
        number = min(ready, key=lambda each: (self._links[each].open, each))
        link = self._links[number]
        if self._calls_to_send:
            ask = self._calls_to_send.pop(0)
            return Send(number, link.call(ask, self._calls[ask], now))
        roomy = [each for each in ready if len(self._links[each].pieces) < self._limits.window]
        ask_next = self._fetch_to_ask()
        if not roomy or ask_next is None:
            return None
        number = min(roomy, key=lambda each: (len(self._links[each].pieces), each))
        return Send(number, self._links[number].next_piece(ask_next, self._fetches[ask_next], now))


def _error(code: FailCode, text: str) -> TransferError:
    return ObjectMissing(text) if code is FailCode.MISSING else TransferError(text)
