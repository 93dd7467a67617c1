"""A server process that tests kill: serves the objects of `transport_tools`, and dies at its `die_at`th read."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from transport_tools import OBJECTS, QUICK_SERVER, TOKEN, Memory, MemoryObject

from rose.waits import WaitBoard
from rose_transfer.transport.interface import ReadableObject
from rose_transfer.transport.tcp import TcpServer


class Mortal(Memory):
    die_at = -1

    def open(self, key: str) -> ReadableObject:
        return MortalObject(self, key)


class MortalObject(MemoryObject):
    def read_at(self, offset: int, length: int) -> bytes:
        if len(self.memory.read) == Mortal.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_at(offset, length)


async def main(port: int, die_at: int) -> None:
    Mortal.die_at = die_at
    server = TcpServer(Mortal(dict(OBJECTS)), token=TOKEN, waits=WaitBoard(), port=port, limits=QUICK_SERVER)
    await server.start()
    print(server.port, flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
