"""`rose relay` as people run it: a process that follows, says a line for each version, and ends when asked."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificate_tools import Authority, make_authority
from distribution_tools import Engine, free_port, line, site
from transport_tools import TOKEN
from typer.testing import CliRunner

from rose.certificates import read_certificates
from rose.cli.app import app
from rose.errors import ConfigError, RoseError, TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store
from rose_transfer.transport.access import read_token
from rose_transfer.transport.interface import Refused
from rose_transfer.transport.landing import MemoryLanding
from rose_transfer.transport.tcp import TcpClient, TcpServer


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def token_file(memory_path: Path) -> Path:
    path = memory_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@asynccontextmanager
async def command(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rose.cli.main",
        "relay",
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def says(started: asyncio.subprocess.Process, *, warning: bool = False) -> str:
    said = started.stderr if warning else started.stdout
    assert said is not None
    async with asyncio.timeout(60.0):
        return (await said.readline()).decode().strip()


def test_it_relays_over_tls_says_so_and_ends_on_sigterm(
    memory_path: Path, token_file: Path, authority: Authority
) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        waits, port = WaitBoard(), free_port()
        own = read_certificates(str(authority.signs("publisher")))
        assert own is not None

        def serve(source: object) -> TcpServer:
            # The relay shows upstream what it serves with.
            return TcpServer(source, token=TOKEN, waits=waits, tls=own.server_context)  # type: ignore[arg-type]

        outlet = Outlet(store, [serve])
        await outlet.open()
        (server,) = outlet.servers
        assert isinstance(server, TcpServer)
        arguments = ["--folder", memory_path / "relay", "--token-file", token_file, "--listen", f"127.0.0.1:{port}"]
        arguments += ["--certificates", authority.signs("relay"), "--send-mb-s", 1]
        async with site(memory_path), command(f"127.0.0.1:{server.port}", *arguments) as relay:
            assert await says(relay) == f"relaying 127.0.0.1:{server.port} on 127.0.0.1:{port}; nothing here yet"
            version, number, size, unit, _, seconds = (await says(relay)).split()
            assert (version, number, unit, seconds) == ("version", "2", "bytes", "s")
            assert int(size) > 0
            client = TcpClient("127.0.0.1", port, token=TOKEN, waits=waits, tls=own.client_context)
            engine = Engine()
            await engine.move(Receiver(client, memory_path / "engine", waits=waits), 2)
            assert engine.has(history[2])
            await client.close()
            with pytest.raises(Refused, match="it asks for a certificate"):
                await without_certificate(authority, port)
            relay.send_signal(signal.SIGTERM)
            assert await relay.wait() == 0
        await outlet.close()
        Store(memory_path / "relay" / "store").close()
        store.close()

    asyncio.run(check())


async def without_certificate(authority: Authority, port: int) -> None:
    """Knows whom to trust, and the token, and shows nothing of its own."""

    def context() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(authority.folder / "ca.crt"))

    client = TcpClient("127.0.0.1", port, token=TOKEN, waits=WaitBoard(), tls=context)
    try:
        await client.fetch("any", MemoryLanding(), deadline_s=60.0)
    finally:
        await client.close()


def test_it_says_when_its_upstream_is_away_and_when_that_is_itself(memory_path: Path, token_file: Path) -> None:
    async def check() -> None:
        port, other = free_port(), free_port()
        arguments = ["--folder", memory_path / "relay", "--token-file", token_file, "--listen", f"127.0.0.1:{port}"]
        async with command(f"127.0.0.1:{other}", *arguments) as relay:
            assert await says(relay) == f"relaying 127.0.0.1:{other} on 127.0.0.1:{port}; nothing here yet"
            said = await says(relay, warning=True)
            assert "no answer about new weights; asking on" in said
            assert f"127.0.0.1:{other} could not be reached within 2 s" in said
        async with command(f"127.0.0.1:{port}", *arguments) as relay:
            assert "this relay follows itself" in await says(relay, warning=True)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"upstream": "nowhere"}, "is no address"),
        ({"upstream": "127.0.0.1:0"}, "is no address"),
        ({"upstream": "two..dots:7070"}, "is no address"),
        ({"--listen": "127.0.0.1:99999"}, "is no address"),
        ({"--token-file": "missing"}, "cannot be read"),
        ({"--certificates": "missing"}, "cannot be read"),
        ({"--certificates": "token"}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(
    memory_path: Path, token_file: Path, changed: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(memory_path)
    given = {"upstream": "127.0.0.1:1", "--folder": "relay", "--token-file": "token", **changed}
    arguments = [given.pop("upstream"), *(word for pair in given.items() for word in pair)]
    ended = CliRunner().invoke(app, ["relay", *arguments])
    assert isinstance(ended.exception, ConfigError)
    assert what in str(ended.exception)
    assert not (memory_path / "relay").exists()


@pytest.mark.parametrize("value", ["inf", "nan", "1e400", "-inf", "-1", "0", "1e10", "9" * 5000, "many"])
@pytest.mark.parametrize("option", ["--disk-gb", "--send-mb-s", "--keep"])
def test_a_number_that_is_none_is_a_usage_error(memory_path: Path, token_file: Path, option: str, value: str) -> None:
    arguments = ["127.0.0.1:1", "--folder", str(memory_path / "relay"), "--token-file", str(token_file)]
    ended = CliRunner().invoke(app, ["relay", *arguments, f"{option}={value}"])
    assert ended.exit_code == 2
    assert f"Invalid value for '{option}'" in ended.output
    assert not (memory_path / "relay").exists()


def test_a_publisher_s_store_is_not_relayed_in_and_stays_as_it_is(memory_path: Path, token_file: Path) -> None:
    store, _ = line(memory_path / "store", 2)
    store.close()
    before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}
    ended = CliRunner().invoke(
        app, ["relay", "127.0.0.1:1", "--folder", str(store.folder), "--token-file", str(token_file)]
    )
    assert isinstance(ended.exception, TransferError)
    assert "is a weight store, of a publisher or a relay; as a relay's folder it would lose" in str(ended.exception)
    assert {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()} == before


def test_a_token_is_read_without_white_space_and_must_be_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n\n")
    assert read_token(path) == TOKEN
    for content in (b"short", b"", b"\xff" * 20):
        path.write_bytes(content)
        with pytest.raises(RoseError) as error:
            read_token(path)
        assert "short" not in str(error.value)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def huge(path: Path) -> Path:
    """Ten gigabytes, of which the disk holds nothing."""
    path.touch()
    os.truncate(path, 10 * 10**9)
    return path


UNREADABLE = {
    "device": (lambda path: Path("/dev/zero"), "no regular file"),
    "pipe": (pipe, "no regular file"),
    "folder": (folder, "no regular file"),
    "huge": (huge, "more than"),
    "long name": (lambda path: path.with_name("a" * 300), "too long"),
    "NUL": (lambda path: Path("a\0b"), "null"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_is_no_small_one_is_refused_at_once(tmp_path: Path, authority: Authority, kind: str) -> None:
    make, what = UNREADABLE[kind]
    file = make(tmp_path / "file")

    def refused(use: Callable[[], object], named: Path) -> None:
        with pytest.raises(ConfigError, match=what) as error:
            use()
        assert str(named) in error.value.what
        assert error.value.expected

    refused(lambda: read_token(file), file)
    if kind in ("long name", "NUL"):
        refused(lambda: read_certificates(str(file)), file)
        return
    for name in ("ca.crt", "tls.crt", "tls.key"):
        folder = authority.signs(f"{kind}-{name}")
        (folder / name).unlink()
        (folder / name).symlink_to(file)
        refused(lambda folder=folder: read_certificates(str(folder)), folder / name)  # type: ignore[misc]


def test_a_token_that_is_refused_is_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for content in ("", "short", f"{TOKEN} " * 4096):
        file.write_text(content)
        with pytest.raises(ConfigError) as error:
            read_token(file)
        assert str(file) in error.value.what
    (tmp_path / "link").symlink_to(file)
    file.write_text(TOKEN)
    assert read_token(tmp_path / "link") == TOKEN


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(authority: Authority, tmp_path: Path) -> None:
    folder, locked = authority.signs("locked"), tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", folder / "tls.key", "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    (folder / "tls.key").write_bytes(locked.read_bytes())
    code = f"""
from rose.certificates import read_certificates
from rose.errors import ConfigError

try:
    read_certificates({str(folder)!r})
except ConfigError as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    asked = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=env
    )
    with asked:  # who waits for an answer is never given one
        try:
            asked.wait(60)
        finally:
            asked.kill()
        assert asked.stdout is not None
        assert b"is locked with a passphrase" in asked.stdout.read()
