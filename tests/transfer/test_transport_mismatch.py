"""Two ends that do not fit are told so at once, on both sides, and what to do about it."""

from __future__ import annotations

import asyncio
import http.server
import logging
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from certificate_tools import make_authority
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

from rose.certificates import read_certificates
from rose.errors import ConfigError, DeadlineExceeded
from rose.waits import WaitBoard
from rose_transfer.transport.frames import FROM_CLIENT, Decoder, FrameError, FrameFault
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.mismatch import missing_of_hello, of_first_frame, of_opening
from rose_transfer.transport.server_session import ServerLimits
from rose_transfer.transport.tcp import TcpClient, TcpServer

LONG_S = 600.0
"""Whoever waits for a deadline to be told does not end in time."""


PATIENT_SERVER = ServerLimits(hello_s=LONG_S)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("strange"))


async def refused(port: int, tls: ssl.SSLContext | None = None, token: str = TOKEN, host: str = "127.0.0.1") -> Refused:
    """What a client is told, by a fetch and by a watch."""
    make = None if tls is None else lambda: tls
    client = TcpClient(host, port, token=token, waits=WaitBoard(), tls=make, limits=QUICK_CLIENT)
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


def test_a_certificate_that_the_server_asks_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = make_authority(tmp_path)
    own, old = authority.signs("own"), authority.signs("old", valid="20200101000000Z 20200201000000Z")
    server_side = read_certificates(str(own))
    assert server_side is not None
    without = ssl.create_default_context(cafile=str(own / "ca.crt"))
    expired = ssl.create_default_context(cafile=str(own / "ca.crt"))
    expired.load_cert_chain(old / "tls.crt", old / "tls.key")

    async def check() -> None:
        waits = WaitBoard()
        server = TcpServer(Memory(), token=TOKEN, waits=waits, tls=server_side.server_context, limits=QUICK_SERVER)
        await server.start()
        try:
            client = TcpClient("127.0.0.1", server.port, token=TOKEN, waits=waits, tls=server_side.client_context)
            assert await fetched(client, "long") == OBJECTS["long"]
            await client.close()
            error = await refused(server.port, without)
            assert "it asks for a certificate, or does not accept this side's" in error.what
            await until(lambda: "the other side shows no certificate" in caplog.text)
            assert "renew the one it has" in (await refused(server.port, expired)).to_do
            await until(lambda: "certificate has expired" in caplog.text)
        finally:
            await server.close()

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


def hello() -> bytes:
    """What a client of TLS says first."""
    outgoing = ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="trainer")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def in_records(hello: bytes, size: int) -> bytes:
    """The same hello, in records of at most `size` bytes."""
    message = hello[5:]
    parts = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(hello[:3] + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize("abort", [False, True], ids=["closes", "aborts"])
@pytest.mark.parametrize("said", [1, 4, 7, -1, None], ids=["a byte", "no record", "a few", "almost all", "all"])
def test_only_who_said_all_of_its_hello_can_have_left_because_of_a_certificate(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, said: int | None, abort: bool
) -> None:
    caplog.set_level(logging.INFO)

    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates, limits=PATIENT_SERVER) as pair:
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
            writer.write(hello()[:said])
            if said is None:
                assert await reader.read(1) != b""
            else:
                await until(lambda: any(wait.what == "first bytes" for wait in pair.waits.snapshot()))
            writer.transport.abort() if abort else writer.close()
            await until(lambda: "peer dropped" in caplog.text or "peer does not fit" in caplog.text)

    asyncio.run(check())
    assert ("certificate" in caplog.text) == (said is None)
    warned = [record for record in caplog.records if record.levelno > logging.INFO]
    assert bool(warned) == (said is None)


def test_who_said_its_hello_in_two_parts_has_said_all_of_it(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates, limits=PATIENT_SERVER) as pair:
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
            said = hello()
            writer.write(said[:100])
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert [wait.what for wait in pair.waits.snapshot()] == ["first bytes"]
            writer.write(said[100:])
            assert await reader.read(1) != b""
            writer.close()
            await until(lambda: "does not accept it" in caplog.text)

    asyncio.run(check())


@pytest.mark.parametrize("size", [1, 3, 100, 2**14])
def test_a_hello_that_comes_bit_by_bit_is_waited_for(certificates: Certificates, size: int) -> None:
    """The server looks at each part as it comes."""

    async def check() -> None:
        async with tcp_pair(Memory(), tls=certificates, limits=PATIENT_SERVER) as pair:
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
            writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = in_records(hello(), size)
            for start in range(0, len(said), 64):
                writer.write(said[start : start + 64])
                await asyncio.sleep(0)
            assert (await reader.read(1)) in (b"\x16", b"\x15")
            writer.close()
            assert await fetched(pair.connect(), "long") == OBJECTS["long"]

    asyncio.run(check())


def test_a_hello_is_known_to_be_whole_at_its_last_byte() -> None:
    said, seen, looks = hello(), 0, 0
    assert missing_of_hello(said + b"more") == 0
    while missing := missing_of_hello(said[:seen]):
        seen, looks = seen + missing, looks + 1
    assert (missing, seen) == (0, len(said))
    assert looks <= 3
    for seen in range(len(said)):
        assert 0 < (missing_of_hello(said[:seen]) or 0) <= len(said) - seen


@pytest.mark.parametrize(
    "seen",
    [
        b"GET /",
        b"\x16GET /",
        b"\x15\x03\x03\x00\x02",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x01\x02",
        b"\x16\x03\x01\xff\xff",
        in_records(hello(), 3),
        in_records(hello(), 100),
    ],
)
def test_what_is_no_hello_is_not_waited_for(seen: bytes) -> None:
    assert missing_of_hello(seen) is None


def test_a_server_with_tls_closes_under_those_who_are_at_its_door(certificates: Certificates) -> None:
    async def check() -> None:
        waits = WaitBoard()
        server = TcpServer(Memory(), token=TOKEN, waits=waits, tls=certificates.server)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: any(wait.what == "first bytes" for wait in waits.snapshot()))
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
            stranger = TcpServer(Memory(), token=TOKEN, waits=pair.waits, port=port, tls=certificates.server)
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
