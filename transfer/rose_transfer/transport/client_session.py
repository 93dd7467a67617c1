"""All connections of one client to one server, and what it wants of them. A pure core.

Fetches are cut into pieces; each piece is asked for on whichever link has the fewest under way, the oldest fetch
first. A link that is lost, silent or out of order costs exactly the pieces that were under way on it: they are asked
for again, on any link. One link is opened when something is asked for, and again, ever more patiently, as long as
somebody waits. How long that is, is the asker's to say: a session gives up only when it is refused.

Servers take so many connections and no more. So further links are opened only once there are more pieces to ask for
than the one has room for, they are given up when they have been idle, and a server that has no room for them is left
alone for as long.

Invariants, beside those of the asks (`client_asks`)
- On a link at most `window` pieces are under way.
- Of several links that are idle, one is kept.
- Nothing is asked of a server that has not proved that it knows the token.
- What comes from a link that was dropped or lost changes nothing.

States of a link: connecting → (Connected) greeting → (CHALLENGE, HELLO sent) proving → (WELCOME) ready.
Anything out of turn drops it; so does silence: before ready for `greet_s`, then for `stall_s` while requests are open.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.driver.core import After
from rose_transfer.transport import auth
from rose_transfer.transport.client_asks import Asks
from rose_transfer.transport.client_events import (
    Arrived,
    Cancelled,
    ClientAction,
    ClientEvent,
    Connect,
    Connected,
    Drop,
    FetchAsked,
    Heard,
    LocateAsked,
    Lost,
    Misfits,
    Retry,
    Send,
    Tick,
    WatchAsked,
)
from rose_transfer.transport.client_state import (
    Asked,
    ClientLimits,
    LinkBook,
    LinkState,
)
from rose_transfer.transport.frames import Frame
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.messages import (
    Challenge,
    Fail,
    FailCode,
    Hello,
    Knock,
    Message,
    ProtocolError,
    Welcome,
    parse,
)
from rose_transfer.transport.mismatch import LEFT_AT_SIGHT, OTHER_TOKEN, TLS_THERE_ONLY, Mismatch, of_paths


class ClientSession:
    """`nonce_seed` is 32 random bytes: the draws for all links are derived from it, so that the core draws nothing.

    `path` is the name of what pieces cross by, beside the connection; empty if they cross on it. `over_tls` says that
    a link is connected once both have shaken hands. `last_trouble` is how the last link ended;
    `unreached`, whether that was before it was connected, and none has been since.
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
        self._asks = Asks(limits.piece_bytes)
        self._failures = 0
        self._rests = 0
        self._resting = False
        self._ticking = False
        self._welcomed = False
        self._misfits = 0
        self._misfit_told = False
        self.last_trouble = ""
        self.unreached = False

    def asked(self, link: int, request: int) -> Asked | None:
        """What was asked for by a request that is open on a link; None if nothing was, or nobody waits any more."""
        known = self._links.get(link)
        return None if known is None else self._asks.under_way(known, request)

    def step(self, event: ClientEvent, now: float) -> Sequence[ClientAction]:
        return [*self._take(event, now), *self._go_on(now)]

    def _take(self, event: ClientEvent, now: float) -> Sequence[ClientAction]:
        match event:
            case FetchAsked():
                return self._asks.fetch(event)
            case WatchAsked(_, _, wait_s):
                self._asks.call(event, now + wait_s)
            case LocateAsked():
                self._asks.call(event, now)
            case Cancelled(ask):
                self._asks.forget(ask)
            case Connected(link):
                self.unreached = False
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
                    self.unreached = mismatch is None and self._links[link].state is LinkState.CONNECTING
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
            ready = link.state is LinkState.READY
            return self._asks.answer(link, message) if ready else self._greet(number, link, message)
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

    # How links end

    def _refuse(self, why: str, mismatch: Mismatch = OTHER_TOKEN) -> Sequence[ClientAction]:
        return self._asks.fail_all(Refused(why, expected=mismatch.expected, to_do=mismatch.to_do))

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
        self._asks.lost(link)
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
        if not self._ticking and (self._asks.open or len(self._links) > 1):
            self._ticking = True
            limits = self._limits
            actions.append(After(min(limits.greet_s, limits.stall_s, limits.spare_s) / 4, Tick()))
        return actions

    def _wanted(self) -> int:
        """How many links there should be at least."""
        if not self._ready():
            return int(self._asks.open)
        return self._limits.streams if self._asks.has_next_piece() else 1

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
        if (call := self._asks.next_call(self._links[number], now)) is not None:
            return Send(number, call)
        roomy = [each for each in ready if len(self._links[each].pieces) < self._limits.window]
        if not roomy:
            return None
        number = min(roomy, key=lambda each: (len(self._links[each].pieces), each))
        piece = self._asks.next_piece(self._links[number], now)
        return None if piece is None else Send(number, piece)
