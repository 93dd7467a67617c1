"""A process at an end, for the tests of how the bench speaks with such: answers, fails, dies, or never answers."""

from __future__ import annotations

import asyncio
import os
import tempfile

from bench.transfer_process import serve
from rose.errors import TransferError


class Odd:
    async def twice(self, number: int) -> int:
        return 2 * number

    async def fail(self) -> None:
        raise ExceptionGroup("two", [TransferError("no room", to_do="free some"), ValueError("odd")])

    async def die(self) -> None:
        os._exit(3)

    async def leave(self) -> str:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            return file.name

    async def hang(self) -> None:
        await asyncio.Event().wait()


if __name__ == "__main__":
    serve(Odd())
