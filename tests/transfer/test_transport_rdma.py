"""RDMA in trouble: servers that die or freeze, peers that hold on to memory, frames that are cut or lie."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from carried_tools import UCX_PATHS, doomed, heard, need_nixl, nixl_agents, rdma_pair
from frame_proxy import HOLD, FrameProxy, Meddle
from test_transport_faults import Stranger
from transport_tools import OBJECTS, PIECE, QUICK_SERVER, Memory, all_at_once, fetched, tcp_pair, until

from rose.errors import ContractError, TransferError
from rose.waits import WaitBoard
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.frames import PIECE_BYTES_MAX
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.landing import FileLanding, MemoryLanding
from rose_transfer.transport.link import Link
from rose_transfer.transport.messages import Get, Lent, Offer
from rose_transfer.transport.nixl_agent import NixlAgent, ReadState
from rose_transfer.transport.rdma import RdmaBorrower, RdmaLender

SIX_PIECES = {"six": Random(6).randbytes(6 * PIECE - 7)}
TWO_STREAMS = ClientLimits(
    streams=2, window=2, piece_bytes=PIECE, greet_s=1.0, stall_s=0.3, retry_s=0.01, retry_s_max=0.05
)
# Against a server that is away for as long as a process takes to start.
PATIENT = ClientLimits(streams=1, window=4, piece_bytes=PIECE, greet_s=1.0, stall_s=1.0, retry_s=0.1, retry_s_max=0.2)


@pytest.fixture(autouse=True)
def _nixl() -> None:
    need_nixl()


IDLE = """
import time
from rose_transfer.transport.nixl_agent import NixlAgent
lender, borrower = NixlAgent(lends=True), NixlAgent(lends=False)
lent, region = lender.register(4096), borrower.register(4096)
lent.memory[:4] = b"lent"
peer = borrower.meet(lender.metadata())
read = borrower.read(peer, lent.address, 4096, region)
while borrower.state(read).value == "under way":
    pass
assert region.memory[:4] == b"lent"
used, began = time.process_time(), time.monotonic()
time.sleep(1.0)
print((time.process_time() - used) / (time.monotonic() - began))
"""


def test_an_agent_that_nobody_reads_from_sleeps() -> None:
    idle = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=60, check=True)
    assert float(idle.stdout.split()[-1]) < 0.2


async def meddled(meddle: Meddle) -> int:
    """Fetch six pieces with a proxy on the control connection that meddles. Returns how many frames came by."""
    async with (
        rdma_pair(Memory(dict(SIX_PIECES)), "shared memory") as pair,
        FrameProxy(pair.server.port, meddle) as proxy,
    ):
        client = pair.connect(limits=TWO_STREAMS, port=proxy.port)
        assert await fetched(client, "six") == SIX_PIECES["six"]
        await client.close()
        return proxy.frames


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: frame * 2,
        lambda _: HOLD,
    ],
    ids=["cut", "corrupted", "repeated", "held back"],
)
def test_every_frame_is_lost_or_changed_once(change: Callable[[bytes], bytes | None]) -> None:
    def only(at: int) -> Meddle:
        return lambda number, frame: change(frame) if number == at else frame

    frames = asyncio.run(meddled(lambda _, frame: frame))
    all_at_once(meddled(only(at)) for at in range(frames))


def nothing_given_up(agent: NixlAgent) -> bool:
    agent.release(agent.register(4096))  # whatever is done with an agent, it looks at what was given up
    return not agent._given_up


def test_a_server_that_freezes_thaws_and_dies_holds_nobody_and_the_fetch_goes_on() -> None:
    path = "shared memory"
    borrowing = nixl_agents(path)[1]
    env = {"UCX_TLS": UCX_PATHS[path]}

    async def check() -> None:
        async with doomed("rdma", signal.SIGSTOP, RdmaBorrower(borrowing), PATIENT, env) as server:
            await server.freezes_and_thaws(2 * PATIENT.stall_s)
            await server.dies_in_a_fetch(lambda port: rdma_pair(Memory(), path, port=port))
            await until(lambda: nothing_given_up(borrowing))

    asyncio.run(check())


def test_a_peer_that_never_takes_what_it_is_lent_is_dropped_and_its_memory_is_free_again() -> None:
    async def check() -> None:
        async with rdma_pair(Memory(), "shared memory", slots=2, limits=QUICK_SERVER) as pair:
            strangers = [await Stranger.greeted(pair.server.port) for _ in range(2)]
            for stranger in strangers:
                stranger.say(Get(1, "long", 0, PIECE))
                assert isinstance(await heard(stranger), Offer)
                assert isinstance(await heard(stranger), Lent)
            # All the memory is lent; who comes next waits until the two are dropped.
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            for stranger in strangers:
                assert await heard(stranger) is None
                stranger.writer.close()

    asyncio.run(check())


def test_many_receivers_share_one_slot() -> None:
    async def check() -> None:
        async with rdma_pair(Memory(dict(SIX_PIECES)), "shared memory", slots=1) as pair:
            came = await asyncio.gather(*(fetched(pair.connect(), "six") for _ in range(8)))
            assert came == [SIX_PIECES["six"]] * 8

    asyncio.run(check())


@pytest.mark.parametrize("path", UCX_PATHS)
def test_an_object_larger_than_all_registered_memory_arrives_in_memory_and_in_a_file(path: str, tmp_path: Path) -> None:
    async def check() -> None:
        content = Random(3).randbytes(2 * PIECE_BYTES_MAX + 12_345)
        async with rdma_pair(Memory({"big": content}), path, slots=1) as pair:
            client = pair.connect(limits=ClientLimits(streams=1, piece_bytes=PIECE_BYTES_MAX))
            assert await fetched(client, "big") == content
            await client.fetch("big", FileLanding(tmp_path / "big"), deadline_s=20)
            assert (tmp_path / "big").read_bytes() == content

    asyncio.run(check())


def test_nothing_is_written_once_a_fetch_has_given_up() -> None:
    async def check() -> None:
        async with rdma_pair(Memory(), "shared memory") as pair:
            client = pair.connect()
            buffer = bytearray(len(OBJECTS["long"]))
            landing = MemoryLanding(buffer)
            fetch = asyncio.ensure_future(client.fetch("long", landing, size_bytes=len(buffer), deadline_s=20))
            await until(lambda: any(buffer))
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            before = bytes(buffer)
            assert await fetched(client, "long") == OBJECTS["long"]
            assert buffer == before

    asyncio.run(check())


def test_a_client_and_a_server_of_different_transports_say_so() -> None:
    async def check() -> None:
        async with rdma_pair(Memory(), "shared memory") as pair, tcp_pair(Memory()) as plain:
            for client in (pair.connect(port=plain.server.port), plain.connect(port=pair.server.port)):
                with pytest.raises(Refused, match="use the same transport on both sides"):
                    await client.fetch("short", MemoryLanding(), deadline_s=30)

    asyncio.run(check())


def test_an_agent_that_does_not_lend_makes_no_lender() -> None:
    with pytest.raises(ContractError, match="does not lend"):
        RdmaLender(nixl_agents("tcp")[1], waits=WaitBoard())


def test_an_offer_that_is_none_is_refused() -> None:
    borrower = RdmaBorrower(nixl_agents("shared memory")[1])
    with pytest.raises(TransferError, match="another path"):
        borrower.taker(b"gloo/1 somewhere")
    with pytest.raises(TransferError, match="cannot be reached"):
        borrower.taker(b"rdma/1 nonsense").take(Lent(1, 0, 9, 9, 0, 0), 1.0)


def test_a_place_outside_the_lent_memory_ends_the_read_not_the_process() -> None:
    lending, borrowing = nixl_agents("shared memory")
    lender = RdmaLender(lending, waits=WaitBoard(), slots=1)
    taker = RdmaBorrower(borrowing).taker(lender.giver().offer)
    with pytest.raises(TransferError, match="read"):
        taker.take(Lent(1, 0, 9, 9, 0, 4096), 5.0)
    taker.cut()
    lender.close()


@pytest.mark.parametrize("first", [0, 1], ids=["the lender first", "the borrower first"])
def test_agents_are_closed_in_any_order_and_are_of_no_more_use(first: int) -> None:
    async def check() -> None:
        waits = WaitBoard()
        lender = RdmaLender(agents[0], waits=waits, slots=1)
        taker = RdmaBorrower(agents[1]).taker(lender.giver().offer)
        async with lender.slot(b"ten bytes!") as place:
            assert await asyncio.to_thread(taker.take, Lent(1, 0, 10, 10, 0, place), 20.0) == b"ten bytes!"
        taker.cut()
        lender.close()
        with pytest.raises(ContractError, match="the lender is closed"):
            lender.giver()

    agents = [NixlAgent(lends=True), NixlAgent(lends=False)]
    asyncio.run(check())
    agents.pop(first).close()
    agents[0].close()
    agents[0].close()
    with pytest.raises(ContractError, match="closed"):
        agents[0].register(4096)


def test_an_agent_is_not_closed_while_it_reads() -> None:
    lending, _ = nixl_agents("shared memory")
    lent, agent = lending.register(4096), NixlAgent(lends=False)
    lent.memory[:4096] = b"x" * 4096
    into = agent.register(4096)
    read = agent.read(agent.meet(lending.metadata()), lent.address, 4096, into)
    agent.close()
    while (state := agent.state(read)) is ReadState.UNDER_WAY:
        pass
    assert (state, bytes(into.memory)) == (ReadState.DONE, b"x" * 4096)
    agent.close()
    lending.release(lent)
    with pytest.raises(ContractError, match="closed"):
        agent.register(4096)


FORKED = """
import gc, os, sys
from rose.errors import ContractError
from rose_transfer.transport.nixl_agent import NixlAgent, ReadState

def read(borrower, peer):
    into = borrower.register(4096)
    under_way = borrower.read(peer, lent.address, 4096, into)
    while (state := borrower.state(under_way)) is ReadState.UNDER_WAY:
        pass
    assert (state, into.memory[:4]) == (ReadState.DONE, b"lent")
    borrower.release(into)

lender, borrower = NixlAgent(lends=True), NixlAgent(lends=False)
lent = lender.register(4096)
lent.memory[:4] = b"lent"
peer = borrower.meet(lender.metadata())
read(borrower, peer)
if (child := os.fork()) == 0:
    try:
        borrower.register(4096)
    except ContractError:
        {in_child}
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
read(borrower, peer)
newcomer = NixlAgent(lends=False)
read(newcomer, newcomer.meet(lender.metadata()))
lender.release(lent)
for agent in (newcomer, borrower, lender):
    agent.close()
print("well")
"""


@pytest.mark.parametrize(
    "in_child",
    ["pass", "lender.close(); borrower.close()", "del lender, borrower; gc.collect()"],
    ids=["exits", "closes", "drops"],
)
def test_a_forked_process_leaves_the_agents_of_the_other_alone(in_child: str) -> None:
    program = FORKED.format(in_child=in_child)
    forked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (forked.returncode, forked.stdout) == (0, "well\n"), forked.stderr


DROPPED = """
import gc, weakref
from rose_transfer.transport.nixl_agent import NixlAgent
lender, borrower = NixlAgent(lends=True), NixlAgent(lends=False)
lent, into = lender.register(4096), borrower.register(4096)
within = weakref.ref(borrower._agent)
read = borrower.read(borrower.meet(lender.metadata()), lent.address, 4096, into)
del borrower
gc.collect()
assert within() is not None
borrower = NixlAgent(lends=False)
within = weakref.ref(borrower._agent)
del borrower
gc.collect()
assert within() is None
print("well")
"""


def test_an_agent_that_is_dropped_while_it_reads_is_left_to_the_process() -> None:
    # In a process of its own: the lender's thread is awake for as long as there is a reader that connects no further.
    dropped = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60)
    assert (dropped.returncode, dropped.stdout) == (0, "well\n"), dropped.stderr


GIVEN_UP = """
import time
from rose_transfer.transport.nixl_agent import NixlAgent
lender, borrower = NixlAgent(lends=True), NixlAgent(lends=False)
lent = lender.register(4096)
peer = borrower.meet(lender.metadata())
given_up = [borrower.read(peer, lent.address, 4096, borrower.register(4096)) for _ in range(3)]
for read in given_up:
    borrower.give_up(read)
while not borrower.swept():
    time.sleep(0.01)
used, began = time.process_time(), time.monotonic()
time.sleep(1.0)
print((time.process_time() - used) / (time.monotonic() - began))
"""


def test_reads_that_were_given_up_are_seen_out_and_then_both_agents_sleep() -> None:
    idle = subprocess.run([sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, timeout=60, check=True)
    assert float(idle.stdout.split()[-1]) < 0.2


def test_without_a_card_clients_of_other_hosts_are_told_to_use_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    lending, _ = nixl_agents("shared memory")
    monkeypatch.setattr(Link, "is_near", property(lambda link: False))
    monkeypatch.setattr(lending, "reaches_far", False)

    async def fetch() -> None:
        async with rdma_pair(Memory(dict(SIX_PIECES)), "shared memory") as pair:
            await fetched(pair.connect(), "six")

    with pytest.raises(TransferError, match=r"no RDMA card.*use TcpServer"):
        asyncio.run(fetch())


def test_links_of_one_host_are_near() -> None:
    async def fetch() -> list[bool]:
        async with rdma_pair(Memory(dict(SIX_PIECES)), "shared memory") as pair:
            assert await fetched(pair.connect(), "six") == SIX_PIECES["six"]
            return [peer.link.is_near for peer in pair.server._peers]

    assert set(asyncio.run(fetch())) == {True}


def test_beside_a_library_that_it_clashes_with_no_agent_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_tools._protoc_compiler", ModuleType("_protoc_compiler"))
    with pytest.raises(TransferError, match="crashes the process"):
        NixlAgent(lends=False)
