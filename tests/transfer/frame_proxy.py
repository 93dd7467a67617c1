"""A man in the middle who knows where frames begin, and does to one of them what a test asks for."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from rose_transfer.transport.frames import HEADER_BYTES

# Passed on behind the next frame of its own connection and direction.
HOLD = b"hold"
# Given the number of a frame and its bytes: the bytes to pass on, or HOLD, or None to cut the connection there.
Meddle = Callable[[int, bytes], bytes | None]


class FrameProxy:
    """Passes frames both ways, numbered in the order in which they come by, all connections together."""

    def __init__(self, port: int, meddle: Meddle) -> None:
        self._to_port = port
        self._meddle = meddle
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.frames = 0
        self.port = 0

    async def __aenter__(self) -> FrameProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(server_writer)
        await asyncio.gather(
            self._pass(reader, server_writer, writer), self._pass(server_reader, writer, server_writer)
        )
        self._writers -= {writer, server_writer}

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: asyncio.StreamWriter
    ) -> None:
        held = b""
        try:
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                frame = header + await reader.readexactly(struct.unpack_from("<I", header, 12)[0])
                number, self.frames = self.frames, self.frames + 1
                passed = self._meddle(number, frame)
                if passed is None:
                    break
                if passed is HOLD:
                    held = frame
                    continue
                writer.write(passed + held)
                held = b""
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        # Not aborted: what was passed on shall arrive before the end does.
        writer.close()
        other.close()
