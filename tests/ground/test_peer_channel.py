"""A channel whose certificates were renewed: who comes later has another one, who is on the old one may end there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificate_tools import make_authority, renew

from rose import certificates
from rose.certificates import bind, read_certificates
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


def test_the_old_channel_is_closed_once_its_calls_have_had_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    authority = make_authority(tmp_path)
    folder = authority.signs("own")

    async def check() -> None:
        async with await asyncio.start_server(silence, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            channel = PeerChannel(address, read_certificates(str(folder)), stub, 0.0)
            call = channel.stub(b"", timeout=600.0)
            renew(folder, authority.signs("new"))
            assert channel.renew()
            assert await asyncio.wait_for(call.code(), 60.0) is grpc.StatusCode.CANCELLED
            await channel.close()
            server.close()

    asyncio.run(check())


def test_a_connection_that_is_there_is_kept_whatever_was_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    authority = make_authority(tmp_path)
    folder = authority.signs("own")

    async def check() -> None:
        server = grpc.aio.server()
        port = bind(server, "127.0.0.1:0", read_certificates(str(authority.signs("server"))))
        await server.start()
        channel = PeerChannel(f"127.0.0.1:{port}", read_certificates(str(folder)), stub, 60.0)
        connected = channel.stub
        assert await connected(b"", timeout=60.0, wait_for_ready=True).code() is grpc.StatusCode.UNIMPLEMENTED
        renew(folder, authority.signs("new"))
        assert not channel.renew()
        assert channel.stub is connected
        await server.stop(None)
        assert await connected(b"", timeout=60.0).code() is grpc.StatusCode.UNAVAILABLE
        assert channel.renew()
        await channel.close()

    asyncio.run(check())
