"""A world for the sessions: one client, one server that dies and comes back, links that do everything links do.

Frames travel as real bytes through real encoders and decoders, so damage is found as it would be in earnest.

What must hold, by the world's own books
- What a session says is in place is in place, byte for byte, at the moment it says so.
- Every ask ends exactly once, or not at all if it was cancelled.
- A server never has more open requests than the client's window and calls allow.
- When faults have stopped, every ask ends: fetches with the whole object, watches with what was announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from rose.driver.core import After
from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.simulator.world import must
from rose_transfer.transport import client_events as client
from rose_transfer.transport import server_session as server
from rose_transfer.transport.client_session import ClientSession
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.frames import FROM_CLIENT, FROM_SERVER, Decoder, Encoder, Frame, FrameError, Kind
from rose_transfer.transport.interface import Announcement, ObjectMissing
from rose_transfer.transport.messages import Data, FailCode, Message, to_frame
from rose_transfer.transport.server_session import ServerLimits, ServerSession

TOKEN = b"the token of both sides"
PIECE = 64
LATENCY_S = 0.01
FAULTS_UNTIL_S = 5.0
QUIET_S = 40.0
CLIENT = ClientLimits(streams=3, window=3, piece_bytes=PIECE, greet_s=0.5, stall_s=1.0, retry_s=0.05, retry_s_max=0.4)
SERVER = ServerLimits(hello_s=0.5, idle_s=3.0, stall_s=1.0, keepalive_s=0.2, requests_max=16)
CALM = FaultPlan()


@dataclass(frozen=True)
class Trouble:
    """What happens beyond the fault plan; chances per frame until faults stop."""

    corrupt: float = 0.0
    truncate: float = 0.0
    cut: float = 0.0
    mute: float = 0.0


@dataclass
class Line:
    """Both ends of one connection."""

    number: int
    session: ServerSession
    client_encoder: Encoder = field(default_factory=Encoder)
    server_encoder: Encoder = field(default_factory=Encoder)
    client_decoder: Decoder = field(default_factory=lambda: Decoder(FROM_SERVER))
    server_decoder: Decoder = field(default_factory=lambda: Decoder(FROM_CLIENT))
    to_serve: deque[server.Serve] = field(default_factory=deque)
    serving: bool = False
    mute: bool = False
    client_open: bool = True
    server_open: bool = True


class LinkWorld:
    """`cut_frame` cuts the connection, and with `kill` the whole server, just before that frame arrives."""

    def __init__(
        self,
        seed: int,
        objects: dict[str, bytes],
        *,
        faults: FaultPlan = CALM,
        trouble: Trouble | None = None,
        limits: ClientLimits = CLIENT,
        server_token: bytes = TOKEN,
        cut_frame: int | None = None,
        kill: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.objects = objects
        self.session = ClientSession(TOKEN, self.random.randbytes(32), limits)
        self.driver: VirtualDriver[client.ClientEvent, client.ClientAction] = VirtualDriver(
            self.session, self._perform, self._check, world="links", seed=seed, random=self.random, faults=faults
        )
        self.limits = limits
        self.trouble = trouble or Trouble()
        self.server_token = server_token
        self.cut_frame = cut_frame
        self.kill = kill
        self.frames = 0
        self.served_bytes = 0
        self.newest: Announcement | None = None
        self.up = True
        self.lines: dict[int, Line] = {}
        self.landed: dict[int, bytearray] = {}
        self.keys: dict[int, str] = {}
        self.complete: dict[int, int] = {}
        self.ended: dict[int, client.ClientAction] = {}
        self.cancelled: set[int] = set()
        self.drops: list[str] = []

    # What happens to it

    def fetch(self, ask: int, key: str, *, resume_from: int = 0, size_known: bool = False) -> None:
        content = self.objects.get(key, b"")
        self.keys[ask] = key
        self.landed[ask] = bytearray(content[:resume_from].ljust(len(content), b"?"))
        self.complete[ask] = resume_from
        self.driver.feed(client.FetchAsked(ask, key, resume_from, len(content) if size_known else None))

    def cancel(self, ask: int) -> None:
        if ask not in self.ended:
            self.cancelled.add(ask)
            self.driver.feed(client.Cancelled(ask))

    def announce(self, version: int) -> None:
        self.newest = Announcement(version, f"manifest-{version}")
        for line in self._open_lines():
            self._tell_server(line, server.Announced(self.newest))

    def crash(self, down_s: float) -> None:
        self.up = False
        for line in self._open_lines():
            self._cut(line)
        self.driver.call(down_s, "server is up again", self._rise)

    def _rise(self) -> None:
        self.up = True

    def _open_lines(self) -> list[Line]:
        return [line for line in self.lines.values() if line.server_open]

    # The client's wishes

    def _perform(self, action: client.ClientAction) -> Sequence[client.ClientEvent]:
        match action:
            case client.Connect(number):
                self._connect(number)
            case client.Send(number, message):
                line = self.lines[number]
                data = line.client_encoder.encode(to_frame(message))
                self._carry(line, data, f"{number} → {message}", to_server=True)
            case client.Drop(number, why):
                self.drops.append(why)
                line = self.lines[number]
                line.client_open = False
                self.driver.call(LATENCY_S, "", lambda: self._close_server(line))
            case client.Grown(ask, complete_bytes):
                must(complete_bytes > self.complete[ask], "what is complete shrinks", action)
                self._must_be_in_place(ask, complete_bytes)
                self.complete[ask] = complete_bytes
            case client.Fetched(ask, size_bytes):
                must(size_bytes == len(self.objects[self.keys[ask]]), "a wrong size", action)
                self._must_be_in_place(ask, size_bytes)
                self._end(ask, action)
            case client.Told(ask) | client.Failed(ask) | client.Found(ask):
                self._end(ask, action)
        return ()

    def _must_be_in_place(self, ask: int, complete_bytes: int) -> None:
        content = self.objects[self.keys[ask]]
        must(self.landed[ask][:complete_bytes] == content[:complete_bytes], "wrong bytes in place", ask)

    def _end(self, ask: int, action: client.ClientAction) -> None:
        must(ask not in self.ended and ask not in self.cancelled, "an ask ends again", action)
        self.ended[ask] = action

    def _connect(self, number: int) -> None:
        session = ServerSession(self.server_token, self.random.randbytes(32), SERVER, local=True)
        line = Line(number, session, mute=self._happens(self.trouble.mute))
        self.lines[number] = line
        if not self.up:
            self._cut(line)
            return

        def accepted() -> None:
            if line.client_open:
                self.driver.feed(client.Connected(number))
                self._tell_server(line, server.Began())
                if self.newest is not None:
                    self._tell_server(line, server.Announced(self.newest))

        self.driver.call(LATENCY_S, f"{number} is connected", accepted)

    def _put(self, number: int, frame: Frame) -> None:
        """As a driver does: a payload that was asked for is put in place before the session hears of it."""
        asked = self.session.asked(number, frame.request)
        fits = asked is not None and asked.offset == frame.offset and asked.size_bytes in (None, frame.size)
        if asked is not None and fits:
            self.landed[asked.ask][frame.offset : frame.offset + len(frame.payload)] = frame.payload

    # The server's wishes

    def _tell_server(self, line: Line, event: server.ServerEvent) -> None:
        if not line.server_open:
            return
        for action in line.session.step(event, self.driver.now):
            match action:
                case After(delay_s, later):
                    self.driver.call(delay_s, "", lambda later=later: self._tell_server(line, later))
                case server.Send(message):
                    self._say(line, message)
                case server.Serve():
                    line.to_serve.append(action)
                    self._serve_next(line)
                case server.Find(request, key):
                    self._tell_server(line, server.Located(request, len(self.objects[key]), f"/dev/shm/{key}"))
                case server.Close():
                    line.server_open = False
                    self.driver.call(2 * LATENCY_S, "", lambda: self._lose_client(line))

    def _say(self, line: Line, message: Message) -> None:
        data = line.server_encoder.encode(to_frame(message))
        self._carry(line, data, f"{line.number} ← {message}", to_server=False)

    def _serve_next(self, line: Line) -> None:
        if line.serving or not line.to_serve:
            return
        line.serving = True
        self.driver.call(0.001 * (1 + self.random.random()), "", lambda: self._serve(line, line.to_serve.popleft()))

    def _serve(self, line: Line, order: server.Serve) -> None:
        line.serving = False
        if not line.server_open:
            return
        content = self.objects.get(order.key)
        if content is None:
            self._tell_server(line, server.RequestFailed(order.request, FailCode.MISSING, order.key))
        elif order.offset > len(content):
            self._tell_server(line, server.RequestFailed(order.request, FailCode.RANGE, order.key))
        else:
            piece = content[order.offset : order.offset + order.length]
            self.served_bytes += len(piece)
            self._tell_server(line, server.PieceMoved(order.request))
            self._say(line, Data(order.request, order.offset, len(content), piece))
            self._tell_server(line, server.PieceSent(order.request))
        self._serve_next(line)

    # The network

    def _happens(self, chance: float) -> bool:
        return self.driver.now < FAULTS_UNTIL_S and self.random.random() < chance

    def _carry(self, line: Line, data: bytes, what: str, *, to_server: bool) -> None:
        if line.mute:
            return
        if self._happens(self.trouble.corrupt):
            spoiled = bytearray(data)
            spoiled[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            data = bytes(spoiled)
        if self._happens(self.trouble.truncate):
            data = data[: self.random.randrange(len(data))]
            self.driver.call(LATENCY_S, f"{line.number} is cut in a frame", lambda: self._cut(line))
        elif self._happens(self.trouble.cut):
            self.driver.call(LATENCY_S * self.random.random(), f"{line.number} is cut", lambda: self._cut(line))
        direction = f"{line.number}{'→' if to_server else '←'}"
        self.driver.send(direction, what, LATENCY_S, lambda: self._arrive(line, data, to_server=to_server))

    def _arrive(self, line: Line, data: bytes, *, to_server: bool) -> None:
        if not (line.server_open if to_server else line.client_open):
            return
        if self.frames == self.cut_frame:
            self.frames += 1
            if self.kill:
                self.crash(0.2)
            self._cut(line)
            return
        self.frames += 1
        try:
            frames = (line.server_decoder if to_server else line.client_decoder).feed(data)
        except FrameError as error:
            if to_server:
                self._close_server(line)
                self.driver.call(LATENCY_S, "", lambda: self._lose_client(line))
            else:
                self._lose_client(line, str(error))
                self.driver.call(LATENCY_S, "", lambda: self._close_server(line))
            return
        for frame in frames:
            if to_server:
                self._tell_server(line, server.Arrived(frame))
            elif line.client_open:
                if frame.kind is Kind.DATA:
                    self._put(line.number, frame)
                self.driver.feed(client.Arrived(line.number, frame))

    def _cut(self, line: Line) -> None:
        self._close_server(line)
        self.driver.call(LATENCY_S, "", lambda: self._lose_client(line))

    def _close_server(self, line: Line) -> None:
        line.server_open = False

    def _lose_client(self, line: Line, why: str = "cut") -> None:
        if line.client_open:
            line.client_open = False
            self.driver.feed(client.Lost(line.number, why))

    # What must hold

    def _check(self) -> None:
        calls = sum(1 for ask in range(100, 110) if ask not in self.landed)
        for line in self._open_lines():
            must(line.session.open_requests <= self.limits.window + calls, "too many requests", line.number)

    def check_quiet(self, asks: set[int]) -> None:
        """Everything that was asked for, and not cancelled, has ended well."""
        for ask in sorted(asks - self.cancelled):
            end = self.ended.get(ask)
            must(end is not None, "an ask never ended", (ask, self.session.last_trouble))
            if ask in self.keys and self.keys[ask] not in self.objects:
                missing = isinstance(end, client.Failed) and isinstance(end.error, ObjectMissing)
                must(missing, "a missing object ends as", end)
            else:
                must(not isinstance(end, client.Failed), "an ask failed", end)
