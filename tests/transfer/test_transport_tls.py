"""Over TLS pieces leave by themselves, and certificates may be renewed while both sides run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from certificate_tools import make_authority, renew, take_over
from transport_tools import OBJECTS, QUICK_SERVER, TOKEN, Memory, fetched, make_certificates, tcp_pair

from rose import certificates
from rose.certificates import Certificates, read_certificates
from rose.waits import WaitBoard
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.link import SLICE_BYTES
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.tcp import TcpClient, TcpServer


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


def test_both_sides_show_what_is_renewed_on_new_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    old, new = (make_authority(tmp_path / name) for name in ("old", "new"))
    folders = [old.signs("server"), old.signs("client")]
    server_side, client_side, late = (read_certificates(str(folder)) for folder in (*folders, new.signs("late")))
    assert server_side is not None
    assert client_side is not None
    assert late is not None

    async def check() -> None:
        waits = WaitBoard()
        server = TcpServer(Memory(), token=TOKEN, waits=waits, tls=server_side.server_context, limits=QUICK_SERVER)
        await server.start()

        async def fetches(own: Certificates) -> None:
            client = TcpClient("127.0.0.1", server.port, token=TOKEN, waits=waits, tls=own.client_context)
            assert await fetched(client, "long") == OBJECTS["long"]
            await client.close()

        try:
            await fetches(client_side)
            take_over(folders[0], new.folder / "late", "tls.crt")  # its key is still on its way
            await fetches(client_side)
            renew(folders[0], new.folder / "late")
            await fetches(late)
            with pytest.raises(Refused, match="not accepted"):
                await fetches(client_side)
            renew(folders[1], new.signs("client"))
            await fetches(client_side)
        finally:
            await server.close()

    asyncio.run(check())
