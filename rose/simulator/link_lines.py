"""Connections that do everything connections do: frames are lost, late, twice, spoiled or cut, and ends fall silent.

Invariants
- Frames travel as real bytes through real encoders and decoders, so damage is found as it would be in earnest.
- An end that is closed hears nothing; the other one learns of it later, if at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rose.driver.virtual import VirtualDriver
from rose_transfer.transport import client_events as client
from rose_transfer.transport import server_session as server
from rose_transfer.transport.frames import FROM_CLIENT, FROM_SERVER, Decoder, Encoder, Frame, FrameError
from rose_transfer.transport.messages import Message, to_frame
from rose_transfer.transport.server_session import ServerSession

LATENCY_S = 0.01
FAULTS_UNTIL_S = 5.0
ClientDriver = VirtualDriver[client.ClientEvent, Any]


@dataclass(frozen=True)
class Trouble:
    """What happens beyond the fault plan; chances per frame, `mute` per connection, until faults stop.

    `cut_frame` cuts the connection just before that frame, counted over all, arrives.
    """

    corrupt: float = 0.0
    truncate: float = 0.0
    cut: float = 0.0
    mute: float = 0.0
    cut_frame: int | None = None


@dataclass
class Line:
    """Both ends of one connection."""

    number: int
    session: ServerSession
    mute: bool
    client_encoder: Encoder = field(default_factory=Encoder)
    server_encoder: Encoder = field(default_factory=Encoder)
    client_decoder: Decoder = field(default_factory=lambda: Decoder(FROM_SERVER))
    server_decoder: Decoder = field(default_factory=lambda: Decoder(FROM_CLIENT))
    to_serve: deque[server.Serve] = field(default_factory=deque)
    serving: bool = False
    client_open: bool = True
    server_open: bool = True


class Lines:
    """All connections of one client, by their number. The two ends hear by `at_client`, `at_server` and `lost`.

    `when_cut` is called before the connection is cut that `Trouble.cut_frame` names.
    """

    def __init__(self, driver: ClientDriver, trouble: Trouble, when_cut: Callable[[], None] = lambda: None) -> None:
        self._driver = driver
        self._trouble = trouble
        self._when_cut = when_cut
        self._lines: dict[int, Line] = {}
        self.frames = 0
        self.at_client: Callable[[Line, Frame], None]
        self.at_server: Callable[[Line, Frame], None]
        self.lost: Callable[[Line, str], None]

    def __getitem__(self, number: int) -> Line:
        return self._lines[number]

    def numbers(self) -> tuple[int, ...]:
        return tuple(self._lines)

    def served(self) -> list[Line]:
        """Those of which the server's end is open."""
        return [line for line in self._lines.values() if line.server_open]

    def add(self, number: int, session: ServerSession) -> Line:
        self._lines[number] = Line(number, session, self._happens(self._trouble.mute))
        return self._lines[number]

    def to_server(self, line: Line, message: Message) -> None:
        self._carry(line, line.client_encoder.encode(to_frame(message)), f"{line.number} → {message}", to_server=True)

    def to_client(self, line: Line, message: Message) -> None:
        self._carry(line, line.server_encoder.encode(to_frame(message)), f"{line.number} ← {message}", to_server=False)

    def cut(self, line: Line) -> None:
        line.server_open = False
        self._driver.call(LATENCY_S, "", lambda: self.lose_client(line))

    def drop(self, line: Line) -> None:
        """The client closes its end."""
        line.client_open = False
        self._driver.call(LATENCY_S, "", lambda: self._close_server(line))

    def lose_client(self, line: Line, why: str = "cut") -> None:
        if line.client_open:
            line.client_open = False
            self.lost(line, why)

    def _happens(self, chance: float) -> bool:
        return self._driver.now < FAULTS_UNTIL_S and self._driver.random.random() < chance

    def _carry(self, line: Line, data: bytes, what: str, *, to_server: bool) -> None:
        if line.mute:
            return
        random = self._driver.random
        if self._happens(self._trouble.corrupt):
            spoiled = bytearray(data)
            spoiled[random.randrange(len(data))] ^= 1 << random.randrange(8)
            data = bytes(spoiled)
        if self._happens(self._trouble.truncate):
            data = data[: random.randrange(len(data))]
            self._driver.call(LATENCY_S, f"{line.number} is cut in a frame", lambda: self.cut(line))
        elif self._happens(self._trouble.cut):
            self._driver.call(LATENCY_S * random.random(), f"{line.number} is cut", lambda: self.cut(line))
        direction = f"{line.number}{'→' if to_server else '←'}"
        self._driver.send(direction, what, LATENCY_S, lambda: self._arrive(line, data, to_server=to_server))

    def _arrive(self, line: Line, data: bytes, *, to_server: bool) -> None:
        if not (line.server_open if to_server else line.client_open):
            return
        self.frames += 1
        if self.frames - 1 == self._trouble.cut_frame:
            self._when_cut()
            self.cut(line)
            return
        try:
            frames = (line.server_decoder if to_server else line.client_decoder).feed(data)
        except FrameError as error:
            self._break(line, str(error), by_server=to_server)
            return
        for frame in frames:
            if to_server:
                self.at_server(line, frame)
            elif line.client_open:
                self.at_client(line, frame)

    def _break(self, line: Line, why: str, *, by_server: bool) -> None:
        """An end that cannot read what came closes itself."""
        if by_server:
            self.cut(line)
        else:
            self.lose_client(line, why)
            self._driver.call(LATENCY_S, "", lambda: self._close_server(line))

    def _close_server(self, line: Line) -> None:
        line.server_open = False
