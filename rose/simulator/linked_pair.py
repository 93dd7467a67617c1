"""A client session and the server that it fetches from, over lines; what the client says is compared with the objects.

What must hold, by the world's own books
- What a session says is in place is in place, byte for byte, at the moment it says so.
- Every ask ends exactly once, or not at all if it was cancelled.
- A server never has more open requests than the client's window and calls allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.simulator.link_lines import Line, Lines, Trouble
from rose.simulator.object_server import ObjectServer
from rose.simulator.world import must
from rose_transfer.transport import client_events as client
from rose_transfer.transport.client_session import ClientSession
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.frames import Frame, Kind
from rose_transfer.transport.interface import ObjectMissing

TOKEN = b"the token of both sides"
PIECE = 64
LIMITS = ClientLimits(
    streams=3, window=3, piece_bytes=PIECE, greet_s=0.5, stall_s=1.0, retry_s=0.05, retry_s_max=0.4, spare_s=1.5
)
CALM, NO_TROUBLE = FaultPlan(), Trouble()
FIRST_WATCH = 100
"""Asks below it are fetches."""
WATCHES = 10
DOWN_S = 0.2


class LinkedPair:
    """With `kill`, the whole server dies with the connection that `Trouble.cut_frame` cuts."""

    def __init__(
        self,
        seed: int,
        objects: Mapping[str, bytes],
        *,
        faults: FaultPlan = CALM,
        trouble: Trouble = NO_TROUBLE,
        limits: ClientLimits = LIMITS,
        server_token: bytes = TOKEN,
        kill: bool = False,
        session: type[ClientSession] = ClientSession,
    ) -> None:
        random = Random(seed)
        self.session = session(TOKEN, random.randbytes(32), limits)
        self.driver: VirtualDriver[client.ClientEvent, client.ClientAction] = VirtualDriver(
            self.session, self._perform, self._check, world="links", seed=seed, random=random, faults=faults
        )
        self.lines = Lines(self.driver, trouble, self._die if kill else lambda: None)
        self.server = ObjectServer(self.driver, self.lines, objects, server_token)
        self.lines.at_client, self.lines.lost = self._heard, self._lost
        self.limits = limits
        self._objects = objects
        self._landed: dict[int, bytearray] = {}
        self.keys: dict[int, str] = {}
        self._complete: dict[int, int] = {}
        self.ended: dict[int, client.ClientAction] = {}
        self._cancelled: set[int] = set()
        self.drops: list[str] = []

    def fetch(self, ask: int, key: str, *, resume_from: int = 0, size_known: bool = False) -> None:
        content = self._objects.get(key, b"")
        self.keys[ask] = key
        self._landed[ask] = bytearray(content[:resume_from].ljust(len(content), b"?"))
        self._complete[ask] = resume_from
        self.driver.feed(client.FetchAsked(ask, key, resume_from, len(content) if size_known else None))

    def cancel(self, ask: int) -> None:
        if ask in self.keys and ask not in self.ended:
            self._cancelled.add(ask)
            self.driver.feed(client.Cancelled(ask))

    def check_ended(self, asks: set[int]) -> None:
        """Everything that was asked for, and not cancelled, has ended well."""
        for ask in sorted(asks - self._cancelled):
            end = self.ended.get(ask)
            must(end is not None, "an ask never ended", (ask, self.session.last_trouble))
            if ask in self.keys and self.keys[ask] not in self._objects:
                missing = isinstance(end, client.Failed) and isinstance(end.error, ObjectMissing)
                must(missing, "a missing object ends as", end)
            else:
                must(not isinstance(end, client.Failed), "an ask failed", end)

    def _perform(self, action: client.ClientAction) -> Sequence[client.ClientEvent]:
        match action:
            case client.Connect(number):
                self.server.accept(number)
            case client.Send(number, message):
                self.lines.to_server(self.lines[number], message)
            case client.Drop(number, why):
                self.drops.append(why)
                self.lines.drop(self.lines[number])
            case client.Grown(ask, complete_bytes):
                must(complete_bytes > self._complete[ask], "what is complete shrinks", action)
                self._must_be_in_place(ask, complete_bytes)
                self._complete[ask] = complete_bytes
            case client.Fetched(ask, size_bytes):
                must(size_bytes == len(self._objects[self.keys[ask]]), "a wrong size", action)
                self._must_be_in_place(ask, size_bytes)
                self._end(ask, action)
            case client.Told(ask) | client.Failed(ask) | client.Found(ask):
                self._end(ask, action)
        return ()

    def _must_be_in_place(self, ask: int, complete_bytes: int) -> None:
        content = self._objects[self.keys[ask]]
        must(self._landed[ask][:complete_bytes] == content[:complete_bytes], "wrong bytes in place", ask)

    def _end(self, ask: int, action: client.ClientAction) -> None:
        must(ask not in self.ended and ask not in self._cancelled, "an ask ends again", action)
        self.ended[ask] = action

    def _heard(self, line: Line, frame: Frame) -> None:
        if frame.kind is Kind.DATA:
            self._put(line.number, frame)
        self.driver.feed(client.Arrived(line.number, frame))

    def _put(self, number: int, frame: Frame) -> None:
        """As a driver does: a payload that was asked for is put in place before the session hears of it."""
        asked = self.session.asked(number, frame.request)
        if asked is not None and asked.offset == frame.offset and asked.size_bytes in (None, frame.size):
            self._landed[asked.ask][frame.offset : frame.offset + len(frame.payload)] = frame.payload

    def _lost(self, line: Line, why: str) -> None:
        self.driver.feed(client.Lost(line.number, why))

    def _die(self) -> None:
        self.server.crash(DOWN_S)

    def _check(self) -> None:
        for line in self.lines.served():
            most = self.limits.window + WATCHES
            must(line.session.open_requests <= most, "too many requests", line.number)
