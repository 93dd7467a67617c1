"""A transport without sockets: one server at a time, and clients that read from what it serves.

It keeps the promises of `transport.interface` without links, so only the end of a server cuts anything: what a world
wants to go wrong, the world itself does to disks and servers. A fetch waits for no server: where there is none, its
deadline has passed. What waits is who watches, and a fetch where `latency_s` says so, after each half of its object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.transport.interface import (
    Announcement,
    Landing,
    ObjectClient,
    ObjectMissing,
    ObjectServer,
    ObjectSource,
    PreparingSource,
)


class Switchboard:
    """Where a server and its clients find each other. To fetch the object of a key takes `latency_s(key)`."""

    def __init__(self, latency_s: Callable[[str], float] = lambda key: 0.0) -> None:
        self.source: ObjectSource | None = None
        self.newest: Announcement | None = None
        self.latency_s = latency_s
        self._news = asyncio.Event()

    def serve(self, source: ObjectSource) -> ObjectServer:
        return _Server(self, source)

    def client(self) -> ObjectClient:
        return _Client(self)

    def announce(self, newest: Announcement) -> None:
        self.newest = newest
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Return at the next announcement."""
        await self._news.wait()


class _Server:
    def __init__(self, board: Switchboard, source: ObjectSource) -> None:
        self._board = board
        self._source = source

    async def start(self) -> None:
        self._board.source = self._source

    def announce(self, newest: Announcement) -> None:
        self._board.announce(newest)

    async def close(self) -> None:
        self._board.source = self._board.newest = None


class _Client:
    def __init__(self, board: Switchboard) -> None:
        self._board = board

    async def fetch(
        self, key: str, into: Landing, *, size_bytes: int | None = None, resume_from: int = 0, deadline_s: float
    ) -> int:
        source = self._board.source
        if source is None:
            raise DeadlineExceeded(f"nobody serves {key[:12]} within {deadline_s:g} s", boundary="transfer")
        if isinstance(source, PreparingSource):
            await source.prepare(key)
        if not source.has(key):
            raise ObjectMissing(f"object {key[:12]} is not there")
        found = source.open(key)
        try:
            size = found.size_bytes
            if size_bytes not in (None, size):
                raise TransferError(f"object {key[:12]} has {size} bytes", expected=f"{size_bytes}")
            room, half, latency_s = into.room(size), (resume_from + size) // 2, self._board.latency_s(key)
            for start, end in ((resume_from, half), (half, size)):
                into.complete_bytes = start
                room[start:end] = found.read_at(start, end - start)
                into.complete_bytes = end
                if latency_s:
                    await asyncio.sleep(latency_s / 2)
                if self._board.source is not source:
                    raise DeadlineExceeded(f"nobody serves {key[:12]} any more", boundary="transfer")
            return size
        finally:
            found.close()

    async def watch(self, at_least: int, *, deadline_s: float) -> Announcement | None:
        try:
            async with asyncio.timeout(deadline_s):
                while (newest := self._board.newest) is None or newest.version < at_least:
                    await self._board.news()
        except TimeoutError as error:
            if self._board.source is None:
                raise DeadlineExceeded(f"nobody answers within {deadline_s:g} s", boundary="transfer") from error
            return None
        return newest

    async def close(self) -> None:
        pass
