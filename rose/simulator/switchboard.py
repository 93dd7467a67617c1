"""A transport without sockets: one server at a time, and clients that read from what it serves.

It keeps the promises of `transport.interface` without links, so nothing is cut: what a world wants to go wrong, the
world itself does to disks and servers. Nobody waits: a server that is not there is a deadline that has passed.
"""

from __future__ import annotations

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
    """Where a server and its clients find each other."""

    def __init__(self) -> None:
        self.source: ObjectSource | None = None
        self.newest: Announcement | None = None

    def serve(self, source: ObjectSource) -> ObjectServer:
        return _Server(self, source)

    def client(self) -> ObjectClient:
        return _Client(self)


class _Server:
    def __init__(self, board: Switchboard, source: ObjectSource) -> None:
        self._board = board
        self._source = source

    async def start(self) -> None:
        self._board.source = self._source

    def announce(self, newest: Announcement) -> None:
        self._board.newest = newest

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
            into.complete_bytes = resume_from
            into.room(size)[resume_from:] = found.read_at(resume_from, size - resume_from)
            into.complete_bytes = size
            return size
        finally:
            found.close()

    async def watch(self, at_least: int, *, deadline_s: float) -> Announcement | None:
        newest = self._board.newest
        return newest if newest is not None and newest.version >= at_least else None

    async def close(self) -> None:
        pass
