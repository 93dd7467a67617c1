"""A connection's bytes, over a real one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rose.waits import WaitBoard
from rose_transfer.transport.frames import FROM_CLIENT, PIECE_BYTES_MAX, Frame, Header, Kind
from rose_transfer.transport.link import Link, LinkEnded
from rose_transfer.transport.mismatch import Mismatch

PIECE = Frame(Kind.DATA, 1, 0, PIECE_BYTES_MAX, bytes(PIECE_BYTES_MAX))


class Owner:
    """Hears what a link has to say."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def opened(self, link: Link) -> None: ...

    def arrived(self, link: Link, frame: Frame) -> None: ...

    def heard(self, link: Link) -> None: ...

    def ended(self, link: Link, why: str, mismatch: Mismatch | None) -> None:
        self.ends.append(why)

    def place(self, link: Link, header: Header) -> memoryview | None:
        return None


def test_nothing_is_written_to_a_connection_that_a_write_found_gone(caplog: pytest.LogCaptureFixture) -> None:
    """A fetch that is cancelled cuts its connection under a server that is about to write a dozen slices."""

    async def check() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        owner, moved = Owner(), []
        _, link = await asyncio.get_running_loop().create_connection(lambda: Link(owner, FROM_CLIENT), sock=ours)
        theirs.close()
        with pytest.raises(LinkEnded):
            await link.send_piece(PIECE, 0, lambda: moved.append(1), waits=WaitBoard(), whom="nobody", stall_s=5.0)
        for _ in range(20):
            link.send(Frame(Kind.BUSY))
        assert owner.ends == []
        await asyncio.sleep(0)
        assert len(owner.ends) == 1
        assert len(moved) <= 1

    asyncio.run(check())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
