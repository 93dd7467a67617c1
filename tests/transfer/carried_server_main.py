"""A server process that tests kill or freeze: lends the objects of `transport_tools` by one path until then."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

from transport_tools import OBJECTS, QUICK_SERVER, TOKEN, Memory, MemoryObject

from rose.waits import WaitBoard
from rose_transfer.transport.carried import CarriedServer
from rose_transfer.transport.carrier import Lender
from rose_transfer.transport.collective import CollectiveLender
from rose_transfer.transport.interface import ReadableObject
from rose_transfer.transport.rdma import RdmaLender

JOIN_S = 15.0
"""A process takes seconds to begin with a GPU."""


class Mortal(Memory):
    """At its 20th read it sends itself `signal_`."""

    signal_ = signal.SIGKILL

    def open(self, key: str) -> ReadableObject:
        return MortalObject(self, key)


class MortalObject(MemoryObject):
    def read_at(self, offset: int, length: int) -> bytes:
        if len(self.memory.read) == 20:
            os.kill(os.getpid(), Mortal.signal_)
        return super().read_at(offset, length)


def lender_of(path: str, waits: WaitBoard) -> Lender:
    # Each imports what only it needs: a process must not take longer to start than a test can wait.
    if path == "gloo":
        from rose_transfer.transport.gloo_collective import GlooCollective

        return CollectiveLender(GlooCollective(), waits=waits)
    if path == "nccl":
        from rose_transfer.transport.nccl_collective import NcclCollective

        return CollectiveLender(NcclCollective(), waits=waits)
    from rose_transfer.transport.nixl_agent import NixlAgent

    return RdmaLender(NixlAgent(lends=True), waits=waits)


async def main(path: str, signal_: int) -> None:
    Mortal.signal_ = signal.Signals(signal_)
    waits = WaitBoard()
    server = CarriedServer(
        Mortal(dict(OBJECTS)),
        lender=lender_of(path, waits),
        token=TOKEN,
        waits=waits,
        limits=replace(QUICK_SERVER, stall_s=JOIN_S) if path == "nccl" else QUICK_SERVER,
    )
    await server.start()
    print(server.port, flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
