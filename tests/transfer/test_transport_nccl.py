"""NCCL's pairs in trouble, on real GPUs: two, or one that both ends share (NCCL 2.30, see `nccl_collectives`)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from carried_tools import CARRIED_CLIENT, SHARE_A_GPU, doomed, nccl_collectives, nccl_pair
from frame_proxy import FrameProxy
from transport_tools import OBJECTS, Memory, fetched

from rose.errors import DeadlineExceeded
from rose_transfer.transport.collective import CollectiveBorrower
from rose_transfer.transport.frames import PIECE_BYTES_MAX

pytestmark = pytest.mark.gpu

JOIN_S = 30.0
PATIENT = replace(CARRIED_CLIENT, greet_s=JOIN_S, stall_s=JOIN_S)
FETCH_S = 60.0
_BOTH_ON_ONE_GPU = """
import threading
from rose.errors import RoseError
from rose_transfer.transport.nccl_collective import NcclCollective
collective, refused = NcclCollective(0), []
pair_id = collective.make_id()
def join(rank):
    try:
        collective.join(pair_id, rank, 30.0)
    except RoseError as error:
        refused.append(error)
ends = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for end in ends:
    end.start()
for end in ends:
    end.join(60)
print(len(refused))
"""


def test_a_pair_that_is_cut_in_the_middle_is_followed_by_a_new_one() -> None:
    async def check() -> None:
        async with nccl_pair(Memory()) as pair:
            for cut in (2, 8, 20, 40):
                async with FrameProxy(pair.server.port, lambda n, frame, cut=cut: None if n == cut else frame) as proxy:
                    client = pair.connect(port=proxy.port)
                    assert await fetched(client, "long", FETCH_S) == OBJECTS["long"]
                    await client.close()

    asyncio.run(check())


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_holds_nobody_and_the_fetch_goes_on_with_the_next(signal_: int) -> None:
    _, borrowing = nccl_collectives()

    async def check() -> None:
        async with doomed("nccl", signal_, CollectiveBorrower(borrowing), PATIENT) as server:
            await server.dies_in_a_fetch(lambda port: nccl_pair(Memory(), port=port))

    asyncio.run(check())


def test_every_length_crosses_and_an_end_that_waits_alone_waits_until_its_deadline_only() -> None:
    lending, borrowing = nccl_collectives()
    pair_id = lending.make_id()
    ends: list[object] = []
    other = threading.Thread(target=lambda: ends.append(borrowing.join(pair_id, 1, JOIN_S)))
    other.start()
    sender = lending.join(pair_id, 0, JOIN_S)
    other.join(JOIN_S)
    (receiver,) = ends
    for length in (1, 7, 4096, PIECE_BYTES_MAX):
        content = os.urandom(length)
        sender.room[:length] = content
        sending = threading.Thread(target=sender.send, args=(length, JOIN_S))
        sending.start()
        receiver.receive(length, JOIN_S)
        sending.join(JOIN_S)
        assert receiver.room[:length] == content
    with pytest.raises(DeadlineExceeded, match="no receive after"):
        receiver.receive(9, 0.5)
    sender.abort()


def test_an_end_whose_other_never_comes_waits_until_its_deadline_only() -> None:
    lending, _ = nccl_collectives()
    with pytest.raises(DeadlineExceeded, match="no other end"):
        lending.join(lending.make_id(), 0, 1.0)


def test_two_ends_on_one_gpu_are_refused_where_nccl_does_not_share_it() -> None:
    pytest.importorskip("cupy")
    folders = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", _BOTH_ON_ONE_GPU],
        env={**os.environ, "PYTHONPATH": folders, SHARE_A_GPU: "0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split()[-1:] == ["2"], done.stdout + done.stderr
