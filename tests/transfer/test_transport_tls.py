"""Over TLS pieces leave by themselves: nobody's patience has to run out for the next slice to come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from transport_tools import Memory, fetched, make_certificates, tcp_pair

from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.link import SLICE_BYTES
from rose_transfer.transport.server_session import ServerLimits


def test_a_piece_of_several_slices_waits_for_nothing_else(tmp_path: Path) -> None:
    """One request at a time: nothing else that happens on the connection gets a held-up slice going again."""

    async def check() -> None:
        objects = {str(slices): Random(slices).randbytes(slices * SLICE_BYTES - 9) for slices in range(1, 6)}
        server = ServerLimits(stall_s=600, keepalive_s=60)
        one_by_one = ClientLimits(streams=1, window=1, stall_s=600)
        async with tcp_pair(Memory(objects), tls=make_certificates(tmp_path), limits=server) as pair:
            client = pair.connect(limits=one_by_one)
            for key, content in objects.items():
                assert await fetched(client, key, 30.0) == content

    asyncio.run(check())
