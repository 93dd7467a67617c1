"""Pieces beside the connection, whatever carries them: messages, faults of the path, peers that break the order.

The path here is a shelf in memory, so that it can be made to fail when a test wants it to.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from carried_tools import CARRIED_CLIENT, CARRIED_SERVER, carried_pair, heard
from test_transport_faults import Stranger
from transport_tools import KNOCK_BYTES, OBJECTS, PIECE, TOKEN, Memory, Pair, fetched, tcp_pair, until

from rose.errors import DeadlineExceeded, TransferError
from rose.waits import WaitBoard
from rose_transfer.transport import auth
from rose_transfer.transport.carried import CarriedClient
from rose_transfer.transport.frames import FROM_CLIENT, HEADER_BYTES, PIECE_BYTES_MAX, Decoder, Encoder, Frame, Kind
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.messages import (
    Challenge,
    Data,
    Get,
    Hello,
    Lent,
    Message,
    Offer,
    ProtocolError,
    Taken,
    Welcome,
    parse,
    to_frame,
)
from rose_transfer.transport.nixl_agent import NixlAgent
from rose_transfer.transport.tcp import TcpClient


@dataclass
class Shelf:
    """A path through memory. `spoil` sees each piece that is taken, by number; `before_giver` each giver made."""

    pieces: dict[int, bytes] = field(default_factory=dict)
    spoil: Callable[[int, bytes], bytes] = lambda _, piece: piece
    before_giver: Callable[[int], None] = lambda _: None
    path: str = "shelf"
    lent: int = 0
    taken: int = 0
    givers: int = 0
    takers: int = 0

    def check_peer(self, *, is_near: bool) -> None:
        assert is_near

    def giver(self) -> Shelf:
        self.before_giver(self.givers)
        self.givers += 1
        return self

    @property
    def offer(self) -> bytes:
        return b"shelf"

    def lend(self, payload: bytes | bytearray | memoryview) -> AbstractAsyncContextManager[int]:
        return self._lend(bytes(payload))

    @asynccontextmanager
    async def _lend(self, payload: bytes) -> AsyncIterator[int]:
        place, self.lent = self.lent, self.lent + 1
        self.pieces[place] = payload
        try:
            yield place
        finally:
            del self.pieces[place]

    def taker(self, offer: bytes) -> ShelfTaker:
        self.takers += 1
        return ShelfTaker(self)

    def cut(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class ShelfTaker:
    shelf: Shelf
    was_cut: threading.Event = field(default_factory=threading.Event)

    def take(self, lent: Lent, deadline_s: float) -> memoryview:
        number, self.shelf.taken = self.shelf.taken, self.shelf.taken + 1
        return memoryview(self.shelf.spoil(number, self.shelf.pieces[lent.place]))

    def cut(self) -> None:
        self.was_cut.set()


def shelf_pair(shelf: Shelf) -> AbstractAsyncContextManager[Pair]:
    return carried_pair(Memory(), shelf, lambda: shelf, WaitBoard(), CARRIED_SERVER, 0)


@pytest.mark.parametrize(
    "message",
    [Offer(b"how"), Lent(3, 2**40, 2**41, PIECE_BYTES_MAX, 2**64 - 1, 2**64 - 1), Taken(3)],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_its_frame(message: Message) -> None:
    assert parse(to_frame(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.OFFER),
        Frame(Kind.OFFER, 1, payload=b"how"),
        to_frame(Lent(0, 0, 9, 9, 0, 0)),
        to_frame(Lent(1, 0, 9, 0, 0, 0)),
        to_frame(Lent(1, 1, 9, 9, 0, 0)),
        to_frame(Lent(1, 0, 2**40, PIECE_BYTES_MAX + 1, 0, 0)),
        Frame(Kind.LENT, 1, 0, 9, bytes(23)),
        Frame(Kind.TAKEN),
        Frame(Kind.TAKEN, 1, 1),
    ],
    ids=repr,
)
def test_a_senseless_frame_is_refused(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        parse(frame)


def test_other_bytes_than_were_lent_are_found_and_asked_for_again() -> None:
    async def check() -> None:
        shelf = Shelf(spoil=lambda number, piece: piece if number != 5 else bytes(len(piece)))
        async with shelf_pair(shelf) as pair:
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            assert shelf.takers == 2, "the connection that brought them was cut"

    asyncio.run(check())


def test_a_path_that_fails_on_either_side_costs_its_connection_only() -> None:
    def break_fifth(number: int, piece: bytes) -> bytes:
        if number == 5:
            raise TransferError("the path broke")
        return piece

    def refuse_first(number: int) -> None:
        if number == 0 and not refused:
            refused.append(number)
            raise TransferError("no path yet")

    async def check() -> None:
        async with shelf_pair(Shelf(spoil=break_fifth, before_giver=refuse_first)) as pair:
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            await until(lambda: pair.server.connections == 1)

    refused: list[int] = []
    asyncio.run(check())
    assert refused == [0]


def test_a_path_with_a_bug_costs_its_connection_not_the_client() -> None:
    def stumble(number: int, piece: bytes) -> bytes:
        if number == 5:
            raise ValueError("a bug")
        return piece

    async def check() -> None:
        async with shelf_pair(Shelf(spoil=stumble)) as pair:
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]

    asyncio.run(check())


def test_a_fetch_that_is_given_up_while_its_piece_is_taken_is_not_written_to_and_holds_up_nobody() -> None:
    gate = threading.Event()

    def wait_at_third(number: int, piece: bytes) -> bytes:
        assert number != 3 or gate.wait(20)
        return piece

    async def check() -> None:
        shelf = Shelf(spoil=wait_at_third)
        async with shelf_pair(shelf) as pair:
            client = pair.connect()
            buffer = bytearray(len(OBJECTS["long"]))
            landing = MemoryLanding(buffer)
            fetch = asyncio.ensure_future(client.fetch("long", landing, size_bytes=len(buffer), deadline_s=20))
            await until(lambda: shelf.taken == 4)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            before = bytes(buffer)
            gate.set()
            assert await fetched(client, "long") == OBJECTS["long"]
            assert buffer == before
            assert shelf.takers == 1, "the connection lives on"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        ([Lent(1, 0, PIECE, PIECE, 0, 0)], "out of turn"),
        ([Offer(b"shelf"), Offer(b"shelf")], "a second offer"),
        ([Offer(b"shelf"), *[Lent(1, 0, PIECE, PIECE, 0, 0)] * 5], "out of turn"),
        ([Offer(b"shelf"), Data(1, 0, 3, b"abc")], "on the connection instead of beside it"),
    ],
    ids=["lent before an offer", "two offers", "more lent than asked for", "bytes on the connection"],
)
def test_a_server_that_breaks_the_order_is_cut(said: list[Message], trouble: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        encoder, decoder = Encoder(), Decoder(FROM_CLIENT)
        writer.write(encoder.encode(to_frame(Challenge(bytes(32)))))
        _, hello = map(parse, decoder.feed(await reader.readexactly(KNOCK_BYTES + len("shelf") + HEADER_BYTES + 64)))
        assert isinstance(hello, Hello)
        writer.write(encoder.encode(to_frame(Welcome(auth.server_proof(TOKEN.encode(), bytes(32), hello.nonce)))))
        await reader.readexactly(HEADER_BYTES + len("long"))
        for message in said:
            writer.write(encoder.encode(to_frame(message)))
        await reader.read()
        writer.close()

    async def check() -> None:
        gate = threading.Event()
        shelf = Shelf({0: bytes(PIECE)}, spoil=lambda _, piece: piece if gate.wait(20) else b"")
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = CarriedClient("127.0.0.1", port, borrower=shelf, token=TOKEN, waits=WaitBoard(), limits=CARRIED_CLIENT)
        with pytest.raises(DeadlineExceeded) as caught:
            await client.fetch("long", MemoryLanding(), deadline_s=0.5)
        assert trouble in caught.value.to_do
        gate.set()
        await client.close()
        server.close()

    asyncio.run(check())


def test_a_client_that_took_what_it_was_not_lent_is_cut() -> None:
    async def check() -> None:
        async with shelf_pair(Shelf()) as pair:
            stranger = await Stranger.greeted(pair.server.port)
            stranger.say(Get(1, "long", 0, PIECE))
            assert isinstance(await heard(stranger), Offer)
            assert isinstance(await heard(stranger), Lent)
            stranger.say(Taken(2))
            assert await heard(stranger) is None
            stranger.writer.close()

    asyncio.run(check())


def test_a_missing_nixl_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(TransferError, match="not installed") as caught:
        NixlAgent(lends=False)
    assert "nixl-cu12" in caught.value.to_do


def test_two_sides_that_carry_pieces_by_other_paths_are_both_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits for the deadline to be told does not end in time."""

    async def check() -> None:
        waits, shelf = WaitBoard(), Shelf()
        async with shelf_pair(shelf) as carried, tcp_pair(Memory()) as plain:
            clients = {
                "on the connection": TcpClient("127.0.0.1", carried.server.port, token=TOKEN, waits=waits),
                "by shelf": CarriedClient("127.0.0.1", plain.server.port, borrower=shelf, token=TOKEN, waits=waits),
                "by rack": CarriedClient(
                    "127.0.0.1", carried.server.port, borrower=Shelf(path="rack"), token=TOKEN, waits=waits
                ),
            }
            for here, client in clients.items():
                for attempt in (client.watch(0, deadline_s=600), client.fetch("long", MemoryLanding(), deadline_s=600)):
                    with pytest.raises(Refused, match=f"pieces cross {here} on this side") as caught:
                        await attempt
                    assert "same transport" in caught.value.to_do
                await client.close()

    asyncio.run(check())
    for here, there in [("by shelf", "on the connection"), ("on the connection", "by shelf"), ("by shelf", "by rack")]:
        assert f"pieces cross {here} on this side, and {there} on the other" in caplog.text
