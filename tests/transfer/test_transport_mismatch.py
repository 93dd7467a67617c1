"""Two ends that do not fit are told so at once, on both sides, and what to do about it."""

from __future__ import annotations

import asyncio
import http.server
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from transport_tools import (
    OBJECTS,
    QUICK_CLIENT,
    QUICK_SERVER,
    TOKEN,
    Certificates,
    Memory,
    fetched,
    make_certificates,
    tcp_pair,
    until,
)

from rose.errors import ConfigError, DeadlineExceeded
from rose.waits import WaitBoard
from rose_transfer.transport.frames import FROM_CLIENT, Decoder, FrameError, FrameFault
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.mismatch import of_first_frame, of_opening
from rose_transfer.transport.tcp import TcpClient, TcpServer

LONG_S = 600.0
"""Whoever waits for a deadline to be told does not end in time."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("strange"))


async def refused(port: int, tls: ssl.SSLContext | None = None, token: str = TOKEN, host: str = "127.0.0.1") -> Refused:
    """What a client is told, by a fetch and by a watch."""
    client = TcpClient(host, port, token=token, waits=WaitBoard(), tls=tls, limits=QUICK_CLIENT)
    try:
        with pytest.raises(Refused) as watching:
            await client.watch(0, deadline_s=LONG_S)
        with pytest.raises(Refused) as fetching:
            await client.fetch("long", MemoryLanding(), deadline_s=LONG_S)
    finally:
        await client.close()
    assert str(watching.value) == str(fetching.value)
    assert f"{host}:{port}" in str(fetching.value)
    return fetching.value


def test_a_client_without_tls_is_told_that_its_server_has_it(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates) as pair:
            error = await refused(pair.server.port)
            assert "the other side speaks TLS" in error.what
            assert "on both sides" in error.to_do
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]

    asyncio.run(check())
    assert "the other side does not" in caplog.text


def test_a_client_with_tls_is_told_that_its_server_has_none(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with tcp_pair(Memory()) as pair:
            error = await refused(pair.server.port, certificates.client())
            assert "the other side does not" in error.what
            assert "on both sides" in error.to_do
            await until(lambda: "the other side speaks TLS" in caplog.text)

    asyncio.run(check())


def test_a_certificate_of_another_authority_is_named(
    certificates: Certificates, strange: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates) as pair:
            error = await refused(pair.server.port, strange.client())
            assert "certificate is not accepted" in error.what
            assert "authority" in error.to_do
            await until(lambda: "does not accept it" in caplog.text)

    asyncio.run(check())


def test_a_certificate_for_another_host_is_named(certificates: Certificates) -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates) as pair:
            error = await refused(pair.server.port, certificates.client(), host="localhost")
            assert "Hostname mismatch" in error.what

    asyncio.run(check())


def test_another_token_is_named_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with tcp_pair(Memory()) as pair:
            error = await refused(pair.server.port, token="some other token")
            assert "does not accept our token" in error.what
            assert "compare the tokens" in error.to_do

    asyncio.run(check())
    assert "the other side has another token" in caplog.text
    assert "some other token" not in caplog.text


def test_a_token_that_is_missing_is_refused_before_anything_is_dialed() -> None:
    with pytest.raises(ConfigError, match="0 bytes"):
        TcpClient("127.0.0.1", 1, token="", waits=WaitBoard())


@contextmanager
def web_server() -> Iterator[int]:
    """Reads lines before it answers."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def test_a_web_server_at_the_address_is_named(certificates: Certificates) -> None:
    with web_server() as port:
        assert "speaks HTTP" in asyncio.run(refused(port)).what
        assert "the other side does not" in asyncio.run(refused(port, certificates.client())).what


@asynccontextmanager
async def service(answer: bytes, *, at_once: bool, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Something else that listens, says `answer`, before or after it heard something, and then waits."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if at_once or await reader.read(1):
            writer.write(answer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "at_once", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", True, "speaks SSH"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, "speaks HTTP"),
        (b"\x15\x03\x03\x00\x02\x02\x46", False, "speaks TLS"),
        (b"-ERR\r\n", False, "speaks another protocol"),
        (b"\x00\x00\x06\x04\x00", True, "speaks another protocol"),
    ],
    ids=["ssh", "http", "tls", "short", "binary"],
)
def test_a_service_of_another_kind_is_named(answer: bytes, at_once: bool, says: str) -> None:
    async def check() -> None:
        async with service(answer, at_once=at_once) as port:
            error = await refused(port)
            assert says in error.what
            assert error.to_do

    asyncio.run(check())


def test_a_service_of_another_kind_behind_tls_is_named(certificates: Certificates) -> None:
    async def check() -> None:
        async with service(b"HTTP/1.1 400 Bad Request\r\n\r\n", at_once=False, tls=certificates.server()) as port:
            assert "speaks HTTP" in (await refused(port, certificates.client())).what

    asyncio.run(check())


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_a_web_client_is_told_of_in_the_log_and_costs_nobody_else(
    certificates: Certificates, with_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(port: int) -> None:
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)

    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates if with_tls else None) as pair:
            await asyncio.to_thread(ask, pair.server.port)
            await until(lambda: "peer does not fit" in caplog.text)
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]

    asyncio.run(check())
    assert ("the other side does not" if with_tls else "the other side speaks HTTP") in caplog.text


def test_who_says_nothing_at_the_door_of_tls_or_half_a_handshake_is_turned_away(certificates: Certificates) -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates) as pair:
            for said in (b"", b"\x16\x03\x01"):
                reader, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
                writer.write(said)
                assert await reader.read() == b""
                writer.close()
            for said in (b"", b"\x16"):
                _, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
                writer.write(said)
                writer.transport.abort()
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]
            await until(lambda: not any(wait.whom.startswith("a peer of") for wait in pair.waits.snapshot()))

    asyncio.run(check())


def test_a_server_with_tls_closes_under_those_who_are_at_its_door(certificates: Certificates) -> None:
    async def check() -> None:
        waits = WaitBoard()
        server = TcpServer(Memory(), token=TOKEN, waits=waits, tls=certificates.server())
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: any(wait.what == "first byte" for wait in waits.snapshot()))
        await server.close()
        assert await reader.read() == b""
        writer.close()
        assert waits.snapshot() == ()

    asyncio.run(check())


def test_a_server_that_was_ours_before_is_waited_for_and_the_log_says_why(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """Something else at its address, while it is away, is no reason to give up what runs."""

    async def check() -> None:
        async with tcp_pair(Memory()) as pair:
            port, client = pair.server.port, pair.connect()
            assert await fetched(client, "short") == OBJECTS["short"]
            await pair.server.close()
            stranger = TcpServer(Memory(), token=TOKEN, waits=pair.waits, port=port, tls=certificates.server())
            await stranger.start()
            with pytest.raises(DeadlineExceeded) as caught:
                await client.fetch("long", MemoryLanding(), deadline_s=0.5)
            assert "the other side speaks TLS" in caught.value.to_do
            await stranger.close()
            again = TcpServer(Memory(), token=TOKEN, waits=pair.waits, port=port, limits=QUICK_SERVER)
            await again.start()
            assert await fetched(client, "long") == OBJECTS["long"]
            await again.close()

    asyncio.run(check())
    assert caplog.text.count("server does not fit any more") == 1


def test_another_version_of_the_protocol_is_named() -> None:
    error = FrameError(FrameFault.VERSION, b"RoSE\x01")
    mismatch = of_first_frame(error)
    assert mismatch is not None
    assert "another version" in mismatch.what
    assert of_first_frame(FrameError(FrameFault.VERSION, None)) is None
    assert of_first_frame(FrameError(FrameFault.PAYLOAD, b"RoSE")) is None


@pytest.mark.parametrize("opening", [b"\x16", b"\x16\x03", b"\x15\x03\x03"])
def test_tls_is_known_by_however_little_came(opening: bytes) -> None:
    assert "speaks TLS" in of_opening(opening).what


@pytest.mark.parametrize("opening", [b"\x16RoSE", b"R", b"SoSE", b"\x00"])
def test_what_is_known_for_nothing_may_be_damage(opening: bytes) -> None:
    assert not of_opening(opening).certain


def test_the_first_wrong_byte_of_a_connection_is_enough() -> None:
    decoder = Decoder(FROM_CLIENT)
    assert decoder.feed(b"Ro") == []
    with pytest.raises(FrameError) as caught:
        decoder.feed(b"X")
    assert (caught.value.fault, caught.value.opening) == (FrameFault.MAGIC, b"RoX")
