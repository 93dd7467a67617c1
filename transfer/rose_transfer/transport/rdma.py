"""Pieces by RDMA within a cluster: the server lends registered memory, the client reads it, one-sided, by NIXL.

    lender = RdmaLender(NixlAgent(lends=True), waits=waits)
    server = CarriedServer(store.objects, lender=lender, token=token, waits=waits, host=…)

    borrower = RdmaBorrower(NixlAgent(lends=False))
    client = CarriedClient(host, port, borrower=borrower, token=token, waits=waits)

Without an RDMA card the same reads go through shared memory, and to clients of the same host only. NIXL was chosen over
Mooncake by measurement, see `bench/rdma_choice.py` and the README.

Invariants
- Registered memory is bounded: `slots` of 4 MiB for a server, one for each connection of a client. Objects of any
  size and files cross through it, so a landing is only written by a copy, and never after its fetch has ended.
- A slot is lent to one connection at a time, and free again when the piece was taken or the connection has ended. A
  client that still reads it then gets other bytes, which the checksum finds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rose.errors import ContractError, DeadlineExceeded, TransferError
from rose.waits import WaitBoard
from rose_transfer.transport.frames import PIECE_BYTES_MAX
from rose_transfer.transport.messages import Lent
from rose_transfer.transport.nixl_agent import NixlAgent, ReadState, Region

_SLOT_S = 20.0
_POLLS_AT_ONCE = 20
_POLL_EVERY_S = 2e-4
# Ahead of the metadata in an offer: what kind of offer it is.
_PATH = "rdma"
_MAGIC = f"{_PATH}/1 ".encode()


class RdmaLender:
    """A server's pool of `slots` pieces, registered with `agent`. Used from the server's loop.

    Raises ContractError if the agent does not lend, TransferError if the memory cannot be registered.
    """

    path = _PATH

    def __init__(self, agent: NixlAgent, *, waits: WaitBoard, slots: int = 16) -> None:
        if not agent.lends:
            raise ContractError("an agent that does not lend", expected="NixlAgent(lends=True)")
        self._agent = agent
        self._waits = waits
        self._region = agent.register(slots * PIECE_BYTES_MAX)
        self._offer = _MAGIC + agent.metadata()
        self._view = memoryview(self._region.memory)
        self._closed = False
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(slots):
            self._free.put_nowait(slot)

    def check_peer(self, *, is_near: bool) -> None:
        """A client of another host needs a card here, or the word of whoever set UCX_TLS."""
        if not is_near and not self._agent.reaches_far:
            raise TransferError(
                "the server's host has no RDMA card, so reads from another host would cross by TCP, where UCX ends the "
                "process of a lender whose reader dies: use TcpServer and TcpClient between these hosts",
            )

    def giver(self) -> _RdmaGiver:
        """Raises ContractError once closed: what would be offered is registered no more."""
        if self._closed:
            raise ContractError("the lender is closed", expected="a new one for each server")
        return _RdmaGiver(self, self._offer)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._agent.release(self._region)

    @asynccontextmanager
    async def slot(self, payload: bytes | bytearray | memoryview) -> AsyncIterator[int]:
        """The address of a slot that holds the payload. Raises DeadlineExceeded if none gets free."""
        slot = await self._waits.within(
            self._free.get(), "a free slot", "the lent memory", _SLOT_S, boundary="transfer"
        )
        try:
            at = slot * PIECE_BYTES_MAX
            self._view[at : at + len(payload)] = payload
            yield self._region.address + at
        finally:
            self._free.put_nowait(slot)


class _RdmaGiver:
    def __init__(self, lender: RdmaLender, offer: bytes) -> None:
        self.offer = offer
        self._lender = lender

    def lend(self, payload: bytes | bytearray | memoryview) -> AbstractAsyncContextManager[int]:
        return self._lender.slot(payload)

    def cut(self) -> None:
        """Leaving `lend` frees the slot."""


class RdmaBorrower:
    """A client's way to what servers lend."""

    path = _PATH

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent

    def taker(self, offer: bytes) -> _RdmaTaker:
        if not offer.startswith(_MAGIC):
            raise TransferError("the server offers another path", to_do="use RDMA on both sides")
        return _RdmaTaker(self._agent, offer[len(_MAGIC) :])


class _RdmaTaker:
    def __init__(self, agent: NixlAgent, metadata: bytes) -> None:
        self._agent = agent
        self._metadata = metadata
        self._peer = ""
        self._region: Region | None = None
        self._cut = threading.Event()
        self._taking = threading.Lock()

    def take(self, lent: Lent, deadline_s: float) -> memoryview:
        """See `carrier.Taker`."""
        try:
            with self._taking:
                return self._take(lent, time.monotonic() + deadline_s)
        finally:
            if self._cut.is_set():
                self._let_go()

    def cut(self) -> None:
        """The memory goes back now, or by the thread that takes a piece, or when a read that was given up ends."""
        self._cut.set()
        self._let_go()

    def _take(self, lent: Lent, until_s: float) -> memoryview:
        if self._region is None:
            self._peer = self._agent.meet(self._metadata)
            self._region = self._agent.register(PIECE_BYTES_MAX)
        read = self._agent.read(self._peer, lent.place, lent.length, self._region)
        polls = 0
        while (state := self._agent.state(read)) is ReadState.UNDER_WAY:
            polls += 1
            if self._cut.wait(_POLL_EVERY_S if polls > _POLLS_AT_ONCE else 0):
                self._agent.give_up(read)
                raise TransferError("the connection was cut while a piece was read")
            if time.monotonic() >= until_s:
                self._agent.give_up(read)
                raise DeadlineExceeded(f"a read of {lent.length} bytes does not end", boundary="transfer")
        if state is ReadState.FAILED:
            raise TransferError("a read failed: the server is gone, or its memory")
        return memoryview(self._region.memory)[: lent.length]

    def _let_go(self) -> None:
        if self._taking.acquire(blocking=False):
            try:
                if self._region is not None:
                    region, self._region = self._region, None
                    self._agent.release(region)
            finally:
                self._taking.release()
