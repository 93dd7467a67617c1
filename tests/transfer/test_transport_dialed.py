"""What lands in a spot, and what no longer does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rose_transfer.transport.dialed import Dialed, Spot
from rose_transfer.transport.frames import Encoder, Frame, Header, Kind
from rose_transfer.transport.lanes import Lane
from rose_transfer.transport.link import Link
from rose_transfer.transport.mismatch import Mismatch

ASK, OTHER = 7, 8


class Listener:
    """Hears what a connection has to say."""

    def __init__(self) -> None:
        self.came: list[tuple[Frame, bool]] = []

    def opened(self, dialed: Dialed) -> None: ...

    def arrived(self, dialed: Dialed, frame: Frame, placed: bool) -> None:
        self.came.append((frame, placed))

    def heard(self, dialed: Dialed) -> None: ...

    def ended(self, dialed: Dialed, why: str, mismatch: Mismatch | None = None) -> None: ...


@contextmanager
def connection() -> Iterator[tuple[Dialed, Link, Listener]]:
    lane, listener, made = Lane("test lane"), Listener(), []
    dialed = Dialed(1, lane, listener)
    lane.now(lambda: made.append(dialed.make_link()))
    try:
        yield dialed, made[0], listener
    finally:
        lane.close()


def receive(link: Link, data: bytes) -> None:
    """As asyncio does."""
    while data:
        room = link.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        link.buffer_updated(count)
        data = data[count:]


def run(check: Callable[[], object]) -> None:
    async def inside() -> None:
        check()

    asyncio.run(inside())


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.DATA, 2, 10, 100, 5),
        Header(Kind.DATA, 1, 11, 100, 5),
        Header(Kind.DATA, 1, 10, 101, 5),
        Header(Kind.DATA, 1, 10, 100, 4),
        Header(Kind.DATA, 1, 10, 100, 6),
    ],
    ids=["request", "offset", "size", "shorter", "longer"],
)
def test_a_payload_that_differs_from_what_was_asked_for_is_not_placed(header: Header) -> None:
    def check() -> None:
        with connection() as (dialed, link, _):
            room = memoryview(bytearray(5))
            dialed.send(Frame(Kind.GET, 1, 10, 5, b"key"), Spot(ASK, 10, 100, room))
            assert dialed.place(link, header) is None

    run(check)


def test_a_spot_is_used_once() -> None:
    def check() -> None:
        with connection() as (dialed, link, _):
            room, header = memoryview(bytearray(5)), Header(Kind.DATA, 1, 10, 100, 5)
            dialed.send(Frame(Kind.GET, 1, 10, 5, b"key"), Spot(ASK, 10, 100, room))
            assert dialed.place(link, header) is room
            assert dialed.place(link, header) is None

    run(check)


def test_a_placed_payload_is_said_to_be_placed_and_another_is_not() -> None:
    async def check() -> None:
        with connection() as (dialed, link, listener):
            room, encoder = memoryview(bytearray(5)), Encoder()
            dialed.send(Frame(Kind.GET, 1, 10, 5, b"key"), Spot(ASK, 10, 100, room))
            frames = [Frame(Kind.DATA, 1, 10, 100, b"there"), Frame(Kind.DATA, 2, 15, 100, b"other")]
            for frame in frames:
                receive(link, encoder.encode(frame))
            await asyncio.sleep(0)
            assert [placed for _, placed in listener.came] == [True, False]
            assert room == b"there"
            assert bytes(listener.came[1][0].payload) == b"other"

    asyncio.run(check())


def test_after_a_revoke_nothing_lands_any_more_neither_begun_nor_to_come() -> None:
    def check() -> None:
        with connection() as (dialed, link, _):
            begun, to_come = memoryview(bytearray(5)), memoryview(bytearray(5))
            dialed.send(Frame(Kind.GET, 1, 10, 5, b"key"), Spot(ASK, 10, 100, begun))
            dialed.send(Frame(Kind.GET, 2, 15, 5, b"key"), Spot(ASK, 15, 100, to_come))
            data = Encoder().encode(Frame(Kind.DATA, 1, 10, 100, b"there"))
            receive(link, data[:-3])
            assert begun == b"th\0\0\0"
            assert not dialed.revoke(OTHER)
            assert dialed.revoke(ASK)
            receive(link, data[-3:])
            assert begun == b"th\0\0\0"
            assert dialed.place(link, Header(Kind.DATA, 2, 15, 100, 5)) is None

    run(check)


def test_a_revoke_before_anything_came_keeps_the_connection() -> None:
    def check() -> None:
        with connection() as (dialed, link, _):
            mine, others = memoryview(bytearray(5)), memoryview(bytearray(5))
            dialed.send(Frame(Kind.GET, 1, 10, 5, b"key"), Spot(ASK, 10, 100, mine))
            dialed.send(Frame(Kind.GET, 2, 10, 5, b"key"), Spot(OTHER, 10, 100, others))
            assert not dialed.revoke(ASK)
            encoder = Encoder()
            receive(link, encoder.encode(Frame(Kind.DATA, 1, 10, 100, b"there")))
            receive(link, encoder.encode(Frame(Kind.DATA, 2, 10, 100, b"there")))
            assert mine == bytes(5)
            assert others == b"there"

    run(check)
