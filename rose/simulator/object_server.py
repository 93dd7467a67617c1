"""A simulated host around the product's server session: it serves objects one piece at a time, dies and comes back.

What must hold, by the world's own books: a client is sent away only while every place belongs to another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rose.driver.core import After
from rose.simulator.link_lines import LATENCY_S, ClientDriver, Line, Lines
from rose.simulator.world import must
from rose_transfer.transport import auth
from rose_transfer.transport import client_events as client
from rose_transfer.transport import server_session as server
from rose_transfer.transport.frames import Frame
from rose_transfer.transport.interface import Announcement
from rose_transfer.transport.messages import Data, FailCode, Hello, to_frame
from rose_transfer.transport.places import Places
from rose_transfer.transport.server_session import ServerLimits, ServerSession

LIMITS = ServerLimits(hello_s=0.5, idle_s=3.0, stall_s=1.0, keepalive_s=0.2, requests_max=16, connections_max=3)
FIRST_RIVAL = 1_000_000


class ObjectServer:
    """Serves `objects`, as they are when they are asked for; `served_bytes` counts what was read of them."""

    def __init__(self, driver: ClientDriver, lines: Lines, objects: Mapping[str, bytes], token: bytes) -> None:
        self._driver = driver
        self._lines = lines
        self._objects = objects
        self._token = token
        self._newest: Announcement | None = None
        self._up = True
        self._guests: list[Line] = []
        self._places: Places[Line] = Places(LIMITS.connections_max)
        self._rivals = 0
        self.served_bytes = 0
        lines.at_server = self._heard

    def accept(self, number: int) -> None:
        """A client connects; it never hears of it if the server is down."""
        session = ServerSession(self._token, self._driver.random.randbytes(32), LIMITS, local=True)
        line = self._lines.add(number, session)
        if not self._up:
            self._lines.cut(line)
            return

        def accepted() -> None:
            if line.client_open:
                self._driver.feed(client.Connected(number))
                self._tell(line, server.Began())
                if self._newest is not None:
                    self._tell(line, server.Announced(self._newest))

        self._driver.call(LATENCY_S, f"{number} is connected", accepted)

    def announce(self, version: int) -> None:
        self._newest = Announcement(version, f"manifest-{version}")
        for line in self._lines.served():
            self._tell(line, server.Announced(self._newest))

    def crowd(self, rivals: int, stay_s: float) -> None:
        """Other clients come, with one connection each, and stay for a while if they are let in."""
        for _ in range(rivals if self._up else 0):
            own, theirs = (self._driver.random.randbytes(32) for _ in range(2))
            session = ServerSession(self._token, own, LIMITS, local=True)
            line = self._lines.add(FIRST_RIVAL + self._rivals, session)
            self._rivals += 1
            self._tell(line, server.Began())
            hello = Hello(theirs, auth.client_proof(self._token, own, theirs))
            self._tell(line, server.Arrived(to_frame(hello)))
            self._driver.call(stay_s, "", partial(self._lines.drop, line))

    def crash(self, down_s: float) -> None:
        self._up = False
        for line in self._lines.served():
            self._lines.cut(line)
        self._driver.call(down_s, "server is up again", self._rise)

    def _rise(self) -> None:
        self._up = True

    def _heard(self, line: Line, frame: Frame) -> None:
        self._tell(line, server.Arrived(frame))

    def _tell(self, line: Line, event: server.ServerEvent) -> None:
        if not line.server_open:
            return
        for action in line.session.step(event, self._driver.now):
            match action:
                case After(delay_s, later):
                    self._driver.call(delay_s, "", partial(self._tell, line, later))
                case server.Send(message):
                    self._lines.to_client(line, message)
                case server.Enter():
                    self._enter(line)
                case server.Serve():
                    line.to_serve.append(action)
                    self._serve_next(line)
                case server.Find(request, key):
                    found = server.Located(request, len(self._objects[key]), f"/dev/shm/{key}")
                    self._tell(line, found)
                case server.Close():
                    line.server_open = False
                    self._driver.call(2 * LATENCY_S, "", lambda: self._lines.lose_client(line))

    def _enter(self, line: Line) -> None:
        for gone in [guest for guest in self._guests if not guest.server_open]:
            self._guests.remove(gone)
            self._places.leave(gone)
        if self._places.full:
            leaver = self._places.leaver_for(line)
            if leaver is None:
                clients = {guest.session.client for guest in self._guests}
                known = line.session.client in clients
                must(known or len(clients) == len(self._guests), "sent away where others have more", line.number)
                self._tell(line, server.GiveWay("full"))
                return
            self._guests.remove(leaver)
            self._places.leave(leaver)
            self._tell(leaver, server.GiveWay("for another"))
        self._guests.append(line)
        self._places.enter(line)
        must(len(self._guests) <= LIMITS.connections_max, "more guests than places", len(self._guests))
        self._tell(line, server.Entered())

    def _serve_next(self, line: Line) -> None:
        if line.serving or not line.to_serve:
            return
        line.serving = True
        delay_s = 0.001 * (1 + self._driver.random.random())
        self._driver.call(delay_s, "", lambda: self._serve(line, line.to_serve.popleft()))

    def _serve(self, line: Line, order: server.Serve) -> None:
        line.serving = False
        if not line.server_open:
            return
        content = self._objects.get(order.key)
        if content is None:
            self._tell(line, server.RequestFailed(order.request, FailCode.MISSING, order.key))
        elif order.offset > len(content):
            self._tell(line, server.RequestFailed(order.request, FailCode.RANGE, order.key))
        else:
            piece = content[order.offset : order.offset + order.length]
            self.served_bytes += len(piece)
            self._tell(line, server.PieceMoved(order.request))
            self._lines.to_client(line, Data(order.request, order.offset, len(content), piece))
            self._tell(line, server.PieceSent(order.request))
        self._serve_next(line)
