"""The client behind every transport that runs over streams: connects, steps the session, puts bytes in place.

Invariants
- A `ClientSession` decides; what it asks for is performed here, and what came of it told. It is stepped in the loop
  of whoever uses the client; bytes are received and checked in lanes.
- Once a fetch has returned or raised, nothing is written to its landing any more: a link in the middle of such a
  write is cut.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rose.driver.core import After
from rose.errors import ContractError, DeadlineExceeded, RoseError, TransferError
from rose.logs import logger
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
    Misfits,
    Send,
    Told,
    WatchAsked,
)
from rose_transfer.transport.client_session import ClientSession
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.dialed import Dialed, Spot
from rose_transfer.transport.frames import Frame, Kind
from rose_transfer.transport.interface import Announcement, Landing, Refused, is_key
from rose_transfer.transport.lanes import Lane
from rose_transfer.transport.link import Link
from rose_transfer.transport.messages import Get, Message, to_frame
from rose_transfer.transport.mismatch import Mismatch, of_handshake

# A server is to answer a watch a little before the asker gives up, or no news could not be told from no server.
_ANSWER_SHARE = 0.1
_ANSWER_S_MIN = 0.5
_CLOSE_S = 1.0


@dataclass(slots=True)
class _Ask:
    answer: asyncio.Future[Any]
    landing: Landing | None = None


class StreamClient(ABC):
    """Pulls objects from one server, called `server` in waits and errors. Used from one event loop."""

    def __init__(
        self, *, token: str, waits: WaitBoard, server: str, limits: ClientLimits, over_tls: bool = False
    ) -> None:
        self._waits = waits
        self._server = server
        self._limits = limits
        self._session = ClientSession(checked_token(token), secrets.token_bytes(32), limits, self.path, over_tls)
        self._asks: dict[int, _Ask] = {}
        self._ask_numbers = itertools.count(1)
        self._dialed: dict[int, Dialed] = {}
        self._lanes: list[Lane] = []
        self._dialing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def path(self) -> str:
        """The name of what pieces cross by, beside the connection; empty if they cross on it."""
        return ""

    @abstractmethod
    async def _dial(self, make_link: Callable[[], Link]) -> None:
        """Connect, in a lane. Raises OSError."""

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
        answer_s = max(_ANSWER_S_MIN, _ANSWER_SHARE * deadline_s)
        asked = WatchAsked(next(self._ask_numbers), at_least, max(0.0, deadline_s - answer_s))
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
        for number in tuple(self._dialed):
            self._cut(number)
        if self._dialing:
            with self._waits.waiting("end of dialing", self._server, _CLOSE_S):
                await asyncio.wait(self._dialing, timeout=_CLOSE_S)
        with self._waits.waiting("end of its threads", self._server, _CLOSE_S):
            for lane in self._lanes:
                lane.close()

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
            if self._session.unreached:
                error.what = f"{self._server} could not be reached within {deadline_s:g} s"
            error.to_do = f"look at {self._server}; its last connection ended with: {trouble}" if trouble else ""
            raise
        finally:
            del self._asks[asked.ask]
            self._step(Cancelled(asked.ask))
            for dialed in tuple(self._dialed.values()):
                if dialed.revoke(asked.ask):
                    self.ended(dialed, "its fetch was given up")

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
                if number in self._dialed:
                    self._dialed[number].send(to_frame(message), self._spot(number, message))
            case Drop(number):
                self._cut(number)
            case Misfits(mismatch):
                logger("transfer").warning(
                    "server does not fit any more", server=self._server, why=mismatch.what, to_do=mismatch.to_do
                )
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
            case Failed(ask, Refused() as refused):
                what = f"{self._server}: {refused.what}"
                self._reject(ask, Refused(what, expected=refused.expected, to_do=refused.to_do))
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
        if len(self._lanes) < min(self._limits.streams, os.cpu_count() or 1):
            self._lanes.append(Lane(f"rose-receive-{len(self._lanes)}"))
        dialed = self._dialed[number] = self._make_dialed(number, self._lanes[number % len(self._lanes)])
        task = asyncio.get_running_loop().create_task(self._dial_in_time(dialed))
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)

    def _make_dialed(self, number: int, lane: Lane) -> Dialed:
        return Dialed(number, lane, self)

    async def _dial_in_time(self, dialed: Dialed) -> None:
        if dialed.given_up:
            return
        dialed.dialing = asyncio.run_coroutine_threadsafe(self._dial(dialed.make_link), dialed.lane.loop)
        dial = asyncio.wrap_future(dialed.dialing)
        try:
            await self._waits.within(dial, "connection", self._server, self._limits.greet_s, boundary="transfer")
        except (OSError, DeadlineExceeded) as error:
            self.ended(dialed, str(error), of_handshake(error))
        except asyncio.CancelledError:
            # Cut while dialing: the session knows.
            if not dialed.dialing.cancelled():
                raise

    def _cut(self, number: int) -> None:
        dialed = self._dialed.pop(number, None)
        if dialed is not None:
            dialed.cut()

    def _spot(self, number: int, message: Message) -> Spot | None:
        """Where the answer lands; None if that is to be seen when it has come."""
        asked = self._session.asked(number, message.request) if isinstance(message, Get) else None
        if asked is None or asked.size_bytes is None:
            return None
        room = self._room(asked.ask, asked.size_bytes)
        if room is None:
            return None
        return Spot(asked.ask, asked.offset, asked.size_bytes, room[asked.offset : asked.offset + asked.length])

    def opened(self, dialed: Dialed) -> None:
        self._step(Connected(dialed.number))

    def arrived(self, dialed: Dialed, frame: Frame, placed: bool) -> None:
        if frame.kind is Kind.DATA and not placed and not self._closed:
            self._put(dialed.number, frame)
        self._step(Arrived(dialed.number, frame))

    def heard(self, dialed: Dialed) -> None:
        self._step(Heard(dialed.number))

    def ended(self, dialed: Dialed, why: str, mismatch: Mismatch | None = None) -> None:
        if dialed.number in self._dialed:
            self._cut(dialed.number)
            self._step(Lost(dialed.number, why, mismatch))

    def _put(self, number: int, frame: Frame) -> None:
        """A piece of an object whose size was not known; if it is no answer to a request, the session sees to it."""
        asked = self._session.asked(number, frame.request)
        if asked is None or frame.offset != asked.offset or asked.size_bytes not in (None, frame.size):
            return
        room = self._room(asked.ask, frame.size)
        if room is not None and frame.offset + len(frame.payload) <= len(room):
            room[frame.offset : frame.offset + len(frame.payload)] = frame.payload
