"""Connections that a test stands in the middle of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def late_front(address: str, late_s: float) -> AsyncIterator[str]:
    """An address before another one, where each connection is taken at once, and nothing passes for so long."""
    host, port = address.rsplit(":", 1)

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(late_s)
        with contextlib.suppress(OSError):
            behind = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_passed_on(reader, behind[1]), _passed_on(behind[0], writer))

    async with await asyncio.start_server(late, "127.0.0.1", 0) as front:
        yield f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
        front.close()


async def _passed_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            to.write(data)
    to.close()
