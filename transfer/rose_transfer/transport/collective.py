"""Pieces by a collective library within a cluster: each connection has a communicator of its own, of two ranks.

    server = CarriedServer(store.objects, lender=CollectiveLender(NcclCollective(), waits=waits), token=…, waits=waits)
    client = CarriedClient(host, port, borrower=CollectiveBorrower(NcclCollective()), token=…, waits=waits)

The server (rank 0) makes the pair's id and offers it; both join; then each LENT is one send and one receive, in the
order of the frames. NCCL is the real one (`nccl_collective`); gloo (`gloo_collective`) keeps the same promises on
machines without a GPU.

Invariants
- A communicator lives and dies with its connection. After anything went wrong it is aborted, and a new connection
  makes a new one; nobody else's communicator, and no default process group, is touched.
- A peer that died or froze is waited for until the deadline of the call, then the pair is aborted.
- Memory is bounded: one piece on each side of a pair.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.transport.messages import Lent

_STALL_S = 20.0


class CommunicatorPair(Protocol):
    """One end of a communicator of two. Used by one thread at a time, but for `abort`."""

    room: memoryview
    """Memory of the longest piece: what is sent from, and received into."""

    def send(self, length: int, deadline_s: float) -> None:
        """Send the first `length` bytes of `room`. Raises TransferError or DeadlineExceeded."""
        ...

    def receive(self, length: int, deadline_s: float) -> None:
        """Receive the first `length` bytes of `room`. Raises TransferError or DeadlineExceeded."""
        ...

    def abort(self) -> None:
        """End the pair, at once, from any thread, again if need be; a call under way ends by its own deadline."""
        ...


class Collective(Protocol):
    """A library that can make pairs."""

    name: str

    def make_id(self) -> bytes:
        """A fresh pair's id, for both ends to join by. Raises TransferError."""
        ...

    def join(self, pair_id: bytes, rank: int, deadline_s: float) -> CommunicatorPair:
        """Wait for the other end. Called in a thread. Raises TransferError or DeadlineExceeded."""
        ...


class CollectiveLender:
    """Makes a pair for each connection of a server. Raises what `collective` raises where it cannot run."""

    def __init__(self, collective: Collective, *, waits: WaitBoard, stall_s: float = _STALL_S) -> None:
        self._collective = collective
        self._waits = waits
        self._stall_s = stall_s
        self.path = collective.name

    def check_peer(self, *, is_near: bool) -> None:
        """Any."""

    def giver(self) -> _PairGiver:
        return _PairGiver(self._collective, self._waits, self._stall_s)

    def close(self) -> None:
        """Pairs end with their connections."""


class _PairGiver:
    def __init__(self, collective: Collective, waits: WaitBoard, stall_s: float) -> None:
        self._collective = collective
        self._waits = waits
        self._stall_s = stall_s
        self._pair_id = collective.make_id()
        self._end = _End(collective, self._pair_id, rank=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-give")
        self.offer = _magic(collective) + self._pair_id

    def lend(self, payload: bytes | bytearray | memoryview) -> AbstractAsyncContextManager[int]:
        return self._lend(payload)

    def cut(self) -> None:
        self._end.cut()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _lend(self, payload: bytes | bytearray | memoryview) -> AsyncIterator[int]:
        sending = asyncio.get_running_loop().run_in_executor(self._thread, self._send, payload)
        # Whoever leaves before the end does not ask how it ended.
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
        yield 0
        await self._waits.within(
            sending, "a piece to be sent", self._collective.name, self._stall_s, boundary="transfer"
        )

    def _send(self, payload: bytes | bytearray | memoryview) -> None:
        until_s = time.monotonic() + self._stall_s
        pair = self._end.joined(self._stall_s)
        pair.room[: len(payload)] = payload
        pair.send(len(payload), max(0.0, until_s - time.monotonic()))


class CollectiveBorrower:
    """A client's end of the pairs that a server makes with the same kind of collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.path = collective.name

    def taker(self, offer: bytes) -> _PairTaker:
        magic = _magic(self._collective)
        if not offer.startswith(magic):
            raise TransferError("the server offers another path", to_do=f"use {self._collective.name} on both sides")
        return _PairTaker(_End(self._collective, offer[len(magic) :], rank=1))


class _PairTaker:
    def __init__(self, end: _End) -> None:
        self._end = end

    def take(self, lent: Lent, deadline_s: float) -> memoryview:
        """See `carrier.Taker`."""
        until_s = time.monotonic() + deadline_s
        pair = self._end.joined(deadline_s)
        pair.receive(lent.length, max(0.0, until_s - time.monotonic()))
        return pair.room[: lent.length]

    def cut(self) -> None:
        self._end.cut()


class _End:
    """One end of a pair-to-be: joined at its first use, aborted at the end whatever came first."""

    def __init__(self, collective: Collective, pair_id: bytes, rank: int) -> None:
        self._collective = collective
        self._pair_id = pair_id
        self._rank = rank
        self._lock = threading.Lock()
        self._pair: CommunicatorPair | None = None
        self._cut = threading.Event()

    def joined(self, deadline_s: float) -> CommunicatorPair:
        if self._pair is None and not self._cut.is_set():
            pair = self._collective.join(self._pair_id, self._rank, deadline_s)
            with self._lock:
                self._pair = pair
        if self._pair is None or self._cut.is_set():
            self.cut()
            raise TransferError(f"the {self._collective.name} pair was cut")
        return self._pair

    def cut(self) -> None:
        with self._lock:
            self._cut.set()
            if self._pair is not None:
                self._pair.abort()


def _magic(collective: Collective) -> bytes:
    return f"{collective.name}/1 ".encode()
