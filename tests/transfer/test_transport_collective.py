"""Pairs of a collective in trouble: ends that die, freeze or never come. On gloo, so on any machine."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from array import array
from contextlib import suppress
from dataclasses import replace
from random import Random
from unittest.mock import MagicMock

import pytest
import torch.distributed
from carried_tools import (
    CARRIED_CLIENT,
    CARRIED_SERVER,
    doomed,
    gloo_pair,
    heard,
)
from frame_proxy import FrameProxy, Meddle
from test_transport_faults import Stranger
from transport_tools import OBJECTS, PIECE, Memory, all_at_once, fetched, until

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.transport import nccl_collective
from rose_transfer.transport.collective import CollectiveBorrower
from rose_transfer.transport.gloo_collective import GlooCollective
from rose_transfer.transport.messages import Get, Lent, Offer
from rose_transfer.transport.nccl_collective import NcclCollective

THREE_PIECES = {"three": Random(6).randbytes(3 * PIECE - 7)}
IMPATIENT = replace(CARRIED_CLIENT, stall_s=1.0, retry_s=0.1, retry_s_max=0.2)


async def meddled(meddle: Meddle) -> int:
    """Fetch three pieces with a proxy on the control connection that meddles. Returns how many frames came by."""
    async with gloo_pair(Memory(dict(THREE_PIECES))) as pair, FrameProxy(pair.server.port, meddle) as proxy:
        client = pair.connect(port=proxy.port)
        assert await fetched(client, "three") == THREE_PIECES["three"]
        await client.close()
        return proxy.frames


def test_the_connection_is_cut_at_every_frame_boundary_and_a_new_pair_goes_on() -> None:
    def only(at: int) -> Meddle:
        return lambda number, frame: None if number == at else frame

    frames = asyncio.run(meddled(lambda _, frame: frame))
    all_at_once(meddled(only(at)) for at in range(frames))


def test_a_server_that_freezes_thaws_and_dies_holds_nobody_and_the_fetch_goes_on() -> None:
    async def check() -> None:
        async with doomed("gloo", signal.SIGSTOP, CollectiveBorrower(GlooCollective()), IMPATIENT) as server:
            await server.freezes_and_thaws(2 * IMPATIENT.stall_s)
            await server.dies_in_a_fetch(lambda port: gloo_pair(Memory(), port=port))

    asyncio.run(check())


def test_a_peer_that_never_joins_its_pair_is_dropped_and_its_thread_ends() -> None:
    async def check() -> None:
        limits = replace(CARRIED_SERVER, stall_s=0.5)
        async with gloo_pair(Memory(), limits=limits) as pair:
            stranger = await Stranger.greeted(pair.server.port)
            stranger.say(Get(1, "long", 0, PIECE))
            assert isinstance(await heard(stranger), Offer)
            assert isinstance(await heard(stranger), Lent)
            assert any(thread.name.startswith("rose-give") for thread in threading.enumerate())
            assert await heard(stranger) is None
            await until(lambda: not any(thread.name.startswith("rose-give") for thread in threading.enumerate()))
            stranger.writer.close()

    asyncio.run(check())


def test_an_end_waits_for_the_other_until_its_deadline_only() -> None:
    collective = GlooCollective()
    with pytest.raises(DeadlineExceeded, match="no join after"):
        collective.join(collective.make_id(), 0, 0.3)
    ends: list[object] = []
    pair_id = collective.make_id()
    other = threading.Thread(target=lambda: ends.append(collective.join(pair_id, 1, 10.0)))
    other.start()
    pair = collective.join(pair_id, 0, 10.0)
    other.join(10)
    with pytest.raises(DeadlineExceeded, match="no receive after"):
        pair.receive(9, 0.3)
    with pytest.raises(TransferError, match="aborted"):
        pair.send(9, 0.3)


def test_a_pair_that_was_cut_is_not_joined() -> None:
    collective = GlooCollective()
    taker = CollectiveBorrower(collective).taker(b"gloo/1 " + collective.make_id())
    taker.cut()
    with pytest.raises(TransferError, match="was cut"):
        taker.take(Lent(1, 0, 9, 9, 0, 0), 10.0)


def test_an_offer_that_is_none_is_refused() -> None:
    borrower = CollectiveBorrower(GlooCollective())
    with pytest.raises(TransferError, match="another path"):
        borrower.taker(b"rdma/1 somewhere")
    for nonsense in (b"", b"127.0.0.1", b"127.0.0.1 port name", b"\xff \xff \xff"):
        with pytest.raises(TransferError, match="names no gloo pair"):
            borrower.taker(b"gloo/1 " + nonsense).take(Lent(1, 0, 9, 9, 0, 0), 1.0)


def test_no_process_group_of_others_is_touched() -> None:
    async def check() -> None:
        async with gloo_pair(Memory()) as pair:
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            assert not torch.distributed.is_initialized()

    asyncio.run(check())


def test_missing_cupy_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TransferError, match="CuPy, which is not installed") as caught:
        NcclCollective()
    assert "rose-rl[gpu]" in caught.value.to_do


def test_an_end_without_room_for_a_piece_leaves_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for CuPy joins any pair, and has no memory: no machine with one GPU has a pair to join."""
    left = threading.Event()
    device = MagicMock()
    device.nccl.NcclCommunicator.return_value.abort = left.set
    device.runtime.getDeviceCount.return_value = 1
    device.alloc_pinned_memory.side_effect = MemoryError("no pinned memory")
    monkeypatch.setattr(nccl_collective, "_cupy", lambda: MagicMock(cuda=device))
    with pytest.raises(TransferError, match="no room for a piece: no pinned memory"):
        NcclCollective().join(bytes(128), 0, 20.0)
    assert left.wait(20)


class Pinned(array):  # type: ignore[type-arg] # not subscriptable in Python 3.11
    """Signed bytes, as CuPy's pinned memory."""

    ptr = 0


class Library:
    """What stands in for CuPy and a communicator: calls come back when `come_back` is set, streams are never done."""

    def __init__(self) -> None:
        self.called, self.come_back, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.aborted_in_a_call = False
        self.cuda = MagicMock()
        self.cuda.nccl.NcclError = self.cuda.runtime.CUDARuntimeError = ValueError
        self.cuda.alloc_pinned_memory.side_effect = lambda size: Pinned("b", bytes(size))
        self.cuda.Event.return_value.done = False

    def empty(self, *_: object, **__: object) -> MagicMock:
        return MagicMock()

    uint8 = None

    def recv(self, *_: object) -> None:
        self.called.set()
        self.come_back.wait(20)

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted_in_a_call = self.called.is_set() and not self.come_back.is_set()
        self.aborted.set()


@pytest.mark.parametrize("comes_back", [True, False], ids=["after its call", "in a call that is stuck"])
def test_a_communicator_is_aborted_between_calls_unless_one_is_stuck(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    library = Library()
    monkeypatch.setattr(nccl_collective, "_STUCK_S", 20.0 if comes_back else 0.2)
    pair = nccl_collective.NcclPair(library, 0, library, 1)

    def receive() -> None:
        with suppress(TransferError):
            pair.receive(9, 20.0)

    receiving = threading.Thread(target=receive)
    receiving.start()
    assert library.called.wait(20)
    pair.abort()
    if comes_back:
        library.come_back.set()
    assert library.aborted.wait(20)
    assert library.aborted_in_a_call != comes_back
    library.come_back.set()
    receiving.join(20)
    with pytest.raises(TransferError, match="aborted"):
        pair.receive(9, 1.0)
