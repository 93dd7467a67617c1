"""Objects on one host: the server hands over files, the receiver maps them; no byte crosses a socket.

An object that is a file by itself is handed over as it is. Any other is copied once into `spool`, a folder that
should be on tmpfs, and stays there until 256 others were copied after it or the server closes. Watches, the token and
mended connections are those of TCP, over a Unix socket that only this user may open.

Invariants
- A file that a receiver can be told of is whole: it is written beside, then renamed.
- A mapped file stays readable after the server has removed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rose.errors import ConfigError, TransferError
from rose.waits import WaitBoard
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.fetching import StreamClient
from rose_transfer.transport.frames import PIECE_BYTES_MAX
from rose_transfer.transport.interface import FileObject, Landing, ObjectMissing, ObjectSource
from rose_transfer.transport.link import Link
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.serving import StreamServer

_SOCKET_PATH_BYTES_MAX = 107
_SPOOLED_MAX = 256
_ONE_STREAM = ClientLimits(streams=1)


class SharedMemoryServer(StreamServer):
    """Listens on the Unix socket `socket_path`, which it makes and removes."""

    def __init__(
        self,
        source: ObjectSource,
        *,
        token: str,
        waits: WaitBoard,
        socket_path: Path,
        spool: Path,
        limits: ServerLimits | None = None,
    ) -> None:
        _check_socket_path(socket_path)
        super().__init__(
            source,
            token=token,
            waits=waits,
            name=f"transfer server {socket_path.name}",
            bandwidth_bytes_per_s=None,
            limits=limits or ServerLimits(),
        )
        self._socket_path = socket_path
        self._spool = spool
        self._spooled: dict[str, Path] = {}

    @property
    def local(self) -> bool:
        return True

    async def close(self) -> None:
        await super().close()
        with contextlib.suppress(FileNotFoundError):
            self._socket_path.unlink()
        for path in self._spooled.values():
            path.unlink(missing_ok=True)

    def find(self, key: str) -> tuple[int, str]:
        readable = self.source.open(key)
        try:
            size = readable.size_bytes
            if isinstance(readable, FileObject):
                return size, str(readable.path.absolute())
            path = self._spooled.get(key)
            if path is None:
                path = self._spooled[key] = self._copy(key, size, readable.read_at)
                self._forget_oldest()
            return size, str(path)
        finally:
            readable.close()

    def _forget_oldest(self) -> None:
        for key in list(self._spooled)[:-_SPOOLED_MAX]:
            if (path := self._spooled.pop(key, None)) is not None:
                path.unlink(missing_ok=True)

    def _copy(self, key: str, size: int, read_at: Callable[[int, int], bytes | memoryview]) -> Path:
        """Two peers may copy the same key at once: both copies are whole, the later one stays."""
        path = self._spool.absolute() / key
        descriptor, draft = tempfile.mkstemp(dir=self._spool, prefix=".draft-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                for offset in range(0, size, PIECE_BYTES_MAX):
                    file.write(read_at(offset, min(PIECE_BYTES_MAX, size - offset)))
                if file.tell() != size:
                    raise TransferError(f"{key} ended after {file.tell()} of {size} bytes")
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        return path

    async def _listen(self, make_link: Callable[[], Link]) -> asyncio.Server:
        server = await asyncio.get_running_loop().create_unix_server(make_link, str(self._socket_path), backlog=256)
        self._socket_path.chmod(0o600)
        return server


class SharedMemoryClient(StreamClient):
    """Pulls from the server on `socket_path`."""

    def __init__(self, socket_path: Path, *, token: str, waits: WaitBoard, limits: ClientLimits = _ONE_STREAM) -> None:
        _check_socket_path(socket_path)
        super().__init__(token=token, waits=waits, server=socket_path.name, limits=limits)
        self._socket_path = socket_path

    async def borrow(self, key: str, *, deadline_s: float) -> memoryview:
        """The object itself, read-only and not copied; it lives as long as the view. Raises as `fetch`."""
        size, path = await self.locate(key, deadline_s=deadline_s)
        if not size:
            return memoryview(b"")
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{key} was removed while it was being handed over") from error
        except (OSError, ValueError) as error:
            raise TransferError(
                f"{key} is said to be at {path}, which cannot be mapped: {error}",
                to_do="let both sides see the store's folder under the same path",
            ) from error
        return memoryview(mapped)

    async def fetch(
        self, key: str, into: Landing, *, size_bytes: int | None = None, resume_from: int = 0, deadline_s: float
    ) -> int:
        """One copy, from the server's file to the landing. See `interface.ObjectClient`."""
        into.complete_bytes = resume_from
        with await self.borrow(key, deadline_s=deadline_s) as view:
            if size_bytes not in (None, len(view)):
                raise TransferError(f"{key} has {len(view)} bytes, not {size_bytes}")
            if resume_from > len(view):
                raise TransferError(f"{key} has {len(view)} bytes, asked for offset {resume_from}")
            room = into.room(len(view))
            for offset in range(resume_from, len(view), PIECE_BYTES_MAX):
                room[offset : offset + PIECE_BYTES_MAX] = view[offset : offset + PIECE_BYTES_MAX]
                into.complete_bytes = min(len(view), offset + PIECE_BYTES_MAX)
                # Between pieces others on this loop get their turn, and a cancelled fetch ends.
                await asyncio.sleep(0)
            return len(view)

    async def _dial(self, make_link: Callable[[], Link]) -> None:
        await asyncio.get_running_loop().create_unix_connection(make_link, str(self._socket_path))


def _check_socket_path(path: Path) -> None:
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{path} is too long for a Unix socket",
            expected=f"{_SOCKET_PATH_BYTES_MAX} bytes at most",
            to_do="use a shorter run folder",
        )
