"""A channel whose certificates were renewed: who comes later has another one, who is on the old one may end there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificate_tools import make_authority, renew

from rose import certificates
from rose.certificates import read_certificates
from rose.peer_channel import PeerChannel


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes a connection, and says nothing."""
    await reader.read()
    writer.close()


def stub(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary("/rose.v1.Nobody/Answers")


def test_calls_under_way_stay_on_the_old_channel_until_all_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    authority = make_authority(tmp_path)
    folder = authority.signs("own")

    async def check() -> None:
        async with await asyncio.start_server(silence, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            channel = PeerChannel(address, read_certificates(str(folder)), stub, 60.0)
            assert not channel.renew()
            calls = [asyncio.ensure_future(channel.stub(b"", timeout=60.0).code())]
            renew(folder, authority.signs("new"))
            assert channel.renew()
            assert not channel.renew()
            calls.append(asyncio.ensure_future(channel.stub(b"", timeout=60.0).code()))
            assert not (await asyncio.wait(calls, timeout=0.2))[0]
            await channel.close()
            assert await asyncio.gather(*calls) == 2 * [grpc.StatusCode.CANCELLED]
            server.close()

    asyncio.run(check())


def test_a_channel_that_is_closed_as_soon_as_it_was_renewed_cuts_calls_on_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    authority = make_authority(tmp_path)
    folder = authority.signs("own")

    async def check() -> None:
        async with await asyncio.start_server(silence, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            channel = PeerChannel(address, read_certificates(str(folder)), stub, 60.0)
            call = asyncio.ensure_future(channel.stub(b"", timeout=60.0).code())
            await asyncio.sleep(0.1)
            renew(folder, authority.signs("new"))
            assert channel.renew()
            await channel.close()
            assert await asyncio.wait_for(call, 10.0) is grpc.StatusCode.CANCELLED
            server.close()

    asyncio.run(check())
