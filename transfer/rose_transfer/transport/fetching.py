"""The client behind every transport that runs over streams: connects, steps the session, puts bytes in place.

Invariants
- A `ClientSession` decides; what it asks for is performed here, and what came of it told.
- Once a fetch has returned or raised, nothing is written to its landing any more: a link in the middle of such a
  write is cut.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rose.driver.core import After
from rose.errors import ContractError, DeadlineExceeded, RoseError, TransferError
from rose.waits import WaitBoard
from rose_transfer.transport.auth import checked_token
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
    Send,
    Told,
    WatchAsked,
)
from rose_transfer.transport.client_session import ClientLimits, ClientSession
from rose_transfer.transport.frames import FROM_SERVER, Frame, Header
from rose_transfer.transport.interface import Announcement, Landing, is_key
from rose_transfer.transport.link import Link
from rose_transfer.transport.messages import to_frame

# A server is to answer a watch a little before the asker gives up, or no news could not be told from no server.
_WATCH_SHARE = 0.9


@dataclass(slots=True)
class _Ask:
    answer: asyncio.Future[Any]
    landing: Landing | None = None


@dataclass(slots=True)
class _Dialed:
    number: int
    link: Link
    dialing: asyncio.Task[None] | None = None
    landing_for: int | None = None


class StreamClient(ABC):
    """Pulls objects from one server, called `server` in waits and errors. Used from one event loop."""

    def __init__(self, *, token: str, waits: WaitBoard, server: str, limits: ClientLimits) -> None:
        self._waits = waits
        self._server = server
        self._limits = limits
        self._session = ClientSession(checked_token(token), secrets.token_bytes(32), limits)
        self._asks: dict[int, _Ask] = {}
        self._ask_numbers = itertools.count(1)
        self._by_number: dict[int, _Dialed] = {}
        self._by_link: dict[Link, _Dialed] = {}
        self._closed = False

    @abstractmethod
    async def _dial(self, make_link: Callable[[], Link]) -> None:
        """Connect. Raises OSError."""

    async def fetch(
        self, key: str, into: Landing, *, size_bytes: int | None = None, resume_from: int = 0, deadline_s: float
    ) -> int:
        """See `interface.ObjectClient`."""
        into.complete_bytes = resume_from
        asked = FetchAsked(next(self._ask_numbers), key, resume_from, size_bytes)
        size: int = await self._ask(asked, key, into, f"object {key}", deadline_s)
        return size

    async def watch(self, at_least: int, *, deadline_s: float) -> Announcement | None:
        """See `interface.ObjectClient`."""
        asked = WatchAsked(next(self._ask_numbers), at_least, _WATCH_SHARE * deadline_s)
        newest: Announcement | None = await self._ask(asked, None, None, f"version {at_least}", deadline_s)
        return newest

    async def locate(self, key: str, *, deadline_s: float) -> tuple[int, str]:
        """Size and path of a file that holds the object, from a server on the same host."""
        asked = LocateAsked(next(self._ask_numbers), key)
        found: tuple[int, str] = await self._ask(asked, key, None, f"file of {key}", deadline_s)
        return found

    async def close(self) -> None:
        """End every fetch and watch with TransferError."""
        self._closed = True
        for ask in self._asks.values():
            if not ask.answer.done():
                ask.answer.set_exception(TransferError(f"the client of {self._server} was closed"))
        for number in tuple(self._by_number):
            self._cut(number)

    async def _ask(
        self,
        asked: FetchAsked | WatchAsked | LocateAsked,
        key: str | None,
        landing: Landing | None,
        what: str,
        deadline_s: float,
    ) -> Any:
        if self._closed:
            raise ContractError(f"the client of {self._server} is closed")
        if key is not None and not is_key(key):
            raise ContractError(f"{key!r} is no key")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asks[asked.ask] = _Ask(answer, landing)
        self._step(asked)
        try:
            return await self._waits.within(answer, what, self._server, deadline_s, boundary="transfer")
        except DeadlineExceeded as error:
            trouble = self._session.last_trouble
            error.to_do = f"look at {self._server}; its last connection ended with: {trouble}" if trouble else ""
            raise
        finally:
            del self._asks[asked.ask]
            self._step(Cancelled(asked.ask))
            for dialed in tuple(self._by_number.values()):
                if dialed.landing_for == asked.ask:
                    self._lose(dialed, "its fetch was given up")

    # Stepping the session

    def _step(self, event: ClientEvent) -> None:
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        for action in self._session.step(event, loop.time()):
            if isinstance(action, After):
                loop.call_later(action.delay_s, self._step, action.event)
            else:
                self._perform(action)

    def _perform(self, action: ClientAction) -> None:
        match action:
            case Connect(number):
                self._connect(number)
            case Send(number, message):
                if number in self._by_number:
                    self._by_number[number].link.send(to_frame(message))
            case Drop(number):
                self._cut(number)
            case Grown(ask, complete_bytes):
                landing = self._asks[ask].landing if ask in self._asks else None
                if landing is not None:
                    landing.complete_bytes = complete_bytes
            case Fetched(ask, size_bytes):
                if self._room(ask, size_bytes) is not None:
                    self._resolve(ask, size_bytes)
            case Told(ask, newest):
                self._resolve(ask, newest)
            case Found(ask, size_bytes, path):
                self._resolve(ask, (size_bytes, path))
            case Failed(ask, error):
                self._reject(ask, error)

    def _resolve(self, ask: int, value: object) -> None:
        waiting = self._asks.get(ask)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(value)

    def _reject(self, ask: int, error: RoseError) -> None:
        waiting = self._asks.get(ask)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(error)

    def _room(self, ask: int, size_bytes: int) -> memoryview | None:
        waiting = self._asks.get(ask)
        if waiting is None or waiting.landing is None or waiting.answer.done():
            return None
        try:
            return waiting.landing.room(size_bytes)
        except RoseError as error:
            self._reject(ask, error)
            return None

    # Links

    def _connect(self, number: int) -> None:
        dialed = _Dialed(number, Link(self, FROM_SERVER))
        self._by_number[number] = dialed
        self._by_link[dialed.link] = dialed
        dialed.dialing = asyncio.get_running_loop().create_task(self._dial_in_time(dialed))

    async def _dial_in_time(self, dialed: _Dialed) -> None:
        dial = self._dial(lambda: dialed.link)
        try:
            await self._waits.within(dial, "connection", self._server, self._limits.greet_s, boundary="transfer")
        except (OSError, DeadlineExceeded) as error:
            self._lose(dialed, str(error))

    def _lose(self, dialed: _Dialed, why: str) -> None:
        if dialed.number in self._by_number:
            self._cut(dialed.number)
            self._step(Lost(dialed.number, why))

    def _cut(self, number: int) -> None:
        dialed = self._by_number.pop(number, None)
        if dialed is None:
            return
        del self._by_link[dialed.link]
        dialed.link.abort()
        if dialed.dialing is not None and dialed.dialing is not asyncio.current_task():
            dialed.dialing.cancel()

    def opened(self, link: Link) -> None:
        if link in self._by_link:
            self._step(Connected(self._by_link[link].number))

    def arrived(self, link: Link, frame: Frame) -> None:
        dialed = self._by_link.get(link)
        if dialed is not None:
            dialed.landing_for = None
            self._step(Arrived(dialed.number, frame))

    def heard(self, link: Link) -> None:
        if link in self._by_link:
            self._step(Heard(self._by_link[link].number))

    def ended(self, link: Link, why: str) -> None:
        if link in self._by_link:
            self._lose(self._by_link[link], why)

    def place(self, link: Link, header: Header) -> memoryview | None:
        dialed = self._by_link.get(link)
        spot = None if dialed is None else self._session.expects(dialed.number, header)
        room = None if spot is None else self._room(spot.ask, spot.size_bytes)
        if dialed is None or spot is None or room is None:
            return None
        dialed.landing_for = spot.ask
        return room[spot.offset : spot.offset + header.length]
