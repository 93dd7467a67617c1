"""`rose relay`: follow a publisher, or another relay, and serve its versions to those near by."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import typer

from rose.address import host_and_port
from rose.certificates import Certificates, read_certificates
from rose.errors import ClusterError
from rose.logs import open_log
from rose.waits import WaitBoard
from rose_transfer.distribution import Relay, Relayed
from rose_transfer.store.roles import Role, hold_alone
from rose_transfer.transport.access import read_token
from rose_transfer.transport.tcp import TcpClient, TcpServer

_MB = 10**6


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The command line, as it was given; see `rose relay --help`."""

    upstream: str
    folder: Path
    token_file: Path
    listen: str
    keep: int
    disk_gb: float | None
    send_mb_s: float | None
    certificates: str


def relay_command(options: RelayOptions) -> None:
    """Relay until SIGTERM, which ends it with status 0, or Ctrl-C.

    Raises ConfigError for what cannot be used, ClusterError for an address that cannot be bound, TransferError if
    another process relays in the folder, it is no relay's, or the upstream does not accept the token.
    """
    ends = _ends(options)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"{options.folder} cannot be made: {error.strerror}", to_do="choose another folder"
        ) from error
    # Before the log is opened: in a folder of another role nothing is to change.
    os.close(hold_alone(options.folder, Role.RELAY))
    with open_log(options.folder / "log.jsonl"):
        if not asyncio.run(_relay(options, ends)):
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class _Ends:
    """What the two ends are made of: all that can be wrong with it was found before the folder becomes a relay's."""

    token: str
    upstream: tuple[str, int]
    listen: tuple[str, int]
    certificates: Certificates | None


def _ends(options: RelayOptions) -> _Ends:
    """Raises ConfigError."""
    return _Ends(
        read_token(options.token_file),
        host_and_port(options.upstream),
        host_and_port(options.listen),
        read_certificates(options.certificates),
    )


async def _relay(options: RelayOptions, ends: _Ends) -> bool:
    """Whether it was ended by SIGTERM."""
    host, port = ends.listen
    certificates = ends.certificates
    if certificates is None and not _is_loopback(host):
        typer.echo(f"{options.listen} is served without TLS: whoever sees the network sees the weights", err=True)
    waits = WaitBoard()
    serve = partial(
        TcpServer,
        token=ends.token,
        waits=waits,
        host=host,
        port=port,
        tls=None if certificates is None else certificates.server_context,
        bandwidth_bytes_per_s=None if options.send_mb_s is None else options.send_mb_s * _MB,
    )
    upstream_tls = None if certificates is None else certificates.client_context
    client = TcpClient(*ends.upstream, token=ends.token, waits=waits, tls=upstream_tls)
    try:
        relay = Relay(
            client,
            options.folder,
            waits=waits,
            serve=[serve],
            keep=options.keep,
            bytes_max=None if options.disk_gb is None else int(options.disk_gb * 1000 * _MB),
            on_version=_tell,
        )
        async with relay:
            newest = relay.store.newest
            typer.echo(f"relaying {options.upstream} on {options.listen}; {_has(newest)}")
            return await _until_ended(relay)
    finally:
        await client.close()


async def _until_ended(relay: Relay) -> bool:
    """Run until a signal. Whether that was SIGTERM."""
    following = asyncio.create_task(relay.run())
    asked: list[signal.Signals] = []

    def ask(signum: signal.Signals) -> None:
        asked.append(signum)
        following.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ask, signum)
    with contextlib.suppress(asyncio.CancelledError):
        await following
    return asked[:1] == [signal.SIGTERM]


def _tell(relayed: Relayed) -> None:
    typer.echo(f"version {relayed.version}  {relayed.bytes_received} bytes  {relayed.seconds:.2f} s")


def _has(newest: int | None) -> str:
    return "nothing here yet" if newest is None else f"version {newest} is here"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
