"""`rose relay` as people run it: a process that follows, says a line for each version, and ends when asked."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from distribution_tools import Engine, free_port, line, site
from transport_tools import TOKEN, Certificates, make_certificates
from typer.testing import CliRunner

from rose.cli.app import app
from rose.errors import ConfigError, RoseError, TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver
from rose_transfer.distribution.outlet import Outlet
from rose_transfer.store import Store
from rose_transfer.transport.access import client_tls, host_and_port, read_token, server_tls
from rose_transfer.transport.tcp import TcpClient, TcpServer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


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
    memory_path: Path, token_file: Path, certificates: Certificates
) -> None:
    async def check() -> None:
        store, history = line(memory_path / "store", 2)
        waits, port = WaitBoard(), free_port()

        def serve(source: object) -> TcpServer:
            tls = certificates.server()
            tls.load_verify_locations(certificates.folder / "cert.pem")
            tls.verify_mode = ssl.CERT_REQUIRED  # the relay shows upstream what it serves with
            return TcpServer(source, token=TOKEN, waits=waits, tls=tls)  # type: ignore[arg-type]

        outlet = Outlet(store, [serve])
        await outlet.open()
        (server,) = outlet.servers
        assert isinstance(server, TcpServer)
        arguments = ["--folder", memory_path / "relay", "--token-file", token_file, "--listen", f"127.0.0.1:{port}"]
        arguments += ["--ca", certificates.folder / "cert.pem", "--send-mb-s", 1]
        arguments += ["--cert", certificates.folder / "cert.pem", "--key", certificates.folder / "key.pem"]
        async with site(memory_path), command(f"127.0.0.1:{server.port}", *arguments) as relay:
            assert await says(relay) == f"relaying 127.0.0.1:{server.port} on 127.0.0.1:{port}; nothing here yet"
            version, number, size, unit, _, seconds = (await says(relay)).split()
            assert (version, number, unit, seconds) == ("version", "2", "bytes", "s")
            assert int(size) > 0
            client = TcpClient("127.0.0.1", port, token=TOKEN, waits=waits, tls=certificates.client())
            engine = Engine()
            await engine.move(Receiver(client, memory_path / "engine", waits=waits), 2)
            assert engine.has(history[2])
            await client.close()
            relay.send_signal(signal.SIGTERM)
            assert await relay.wait() == 0
        await outlet.close()
        Store(memory_path / "relay" / "store").close()
        store.close()

    asyncio.run(check())


def test_it_says_when_its_upstream_is_away_and_when_that_is_itself(memory_path: Path, token_file: Path) -> None:
    async def check() -> None:
        port, other = free_port(), free_port()
        arguments = ["--folder", memory_path / "relay", "--token-file", token_file, "--listen", f"127.0.0.1:{port}"]
        async with command(f"127.0.0.1:{other}", *arguments) as relay:
            assert await says(relay) == f"relaying 127.0.0.1:{other} on 127.0.0.1:{port}; nothing here yet"
            said = await says(relay, warning=True)
            assert "no answer about new weights; asking on" in said
            assert f"127.0.0.1:{other}" in said
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
        ({"--cert": "cert.pem"}, "--cert and --key go together"),
        ({"--ca": "token"}, "cannot be used"),
        ({"--cert": "token", "--key": "token"}, "cannot be used"),
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
def test_a_file_that_is_no_small_one_is_refused_at_once(tmp_path: Path, certificates: Certificates, kind: str) -> None:
    make, what = UNREADABLE[kind]
    file = make(tmp_path / "file")
    for use in (
        read_token,
        client_tls,
        lambda file: server_tls(file, certificates.folder / "key.pem"),
        lambda file: server_tls(certificates.folder / "cert.pem", file),
    ):
        with pytest.raises(ConfigError, match=what) as error:
            use(file)
        assert str(file) in error.value.what
        assert error.value.expected


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


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(certificates: Certificates, tmp_path: Path) -> None:
    key, locked = certificates.folder / "key.pem", tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    code = f"""
from pathlib import Path
from rose.errors import ConfigError
from rose_transfer.transport.access import server_tls

try:
    server_tls(Path({str(certificates.folder / "cert.pem")!r}), Path({str(locked)!r}))
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
        assert b"cannot be used" in asked.stdout.read()


def test_addresses() -> None:
    assert host_and_port("trainer:7070") == ("trainer", 7070)
    assert host_and_port("[fd00::7]:1") == ("fd00::7", 1)
    assert host_and_port("[fe80::1%eth0]:7070") == ("fe80::1%eth0", 7070)
    for wrong in ("host:0", f"host:{'9' * 5000}", "a..b:1", f"{'a' * 64}:1", "a b:1", "a\x07:1", "\udcff:1"):
        with pytest.raises(ConfigError):
            host_and_port(wrong)
    for wrong in ("", "7070", ":7070", "host:", "host:-1", "host:65536", "fd00::7:1", "[]:1", "host:٧"):
        with pytest.raises(ConfigError):
            host_and_port(wrong)
