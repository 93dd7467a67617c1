"""What `rose relay` and `rose scheduler` take. Like `app`, it imports nothing before the command is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose.cli.app_options import COUNT_MAX

_UNITS_MAX = 1e9
"""No disk and no link is as large in gigabytes, or megabytes per second; what is endless is above it."""


def relay(
    upstream: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Publisher or relay to follow.")],
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where versions are kept.")],
    token_file: Annotated[Path, typer.Option("--token-file", metavar="FILE", help="File with the shared token.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Serve here.")] = "127.0.0.1:7070",
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1, max=COUNT_MAX, help="Versions to keep.")] = 16,
    disk_gb: Annotated[
        float | None,
        typer.Option(
            "--disk-gb",
            metavar="GB",
            min=0.001,
            max=_UNITS_MAX,
            help="Disk for the versions, at most; another lineage takes as much again until it replaces them.",
        ),
    ] = None,
    send_mb_s: Annotated[
        float | None,
        typer.Option(
            "--send-mb-s", metavar="MB", min=0.001, max=_UNITS_MAX, help="Megabytes to send per second at most."
        ),
    ] = None,
    certificates: Annotated[
        str,
        typer.Option("--certificates", metavar="DIR", help="Folder with ca.crt, tls.crt and tls.key: TLS both ways."),
    ] = "",
) -> None:
    """Pass weights on to the engines near by.

    The link to the publisher carries each version once, however many engines there are here. A line is printed for
    each version: bytes received, and seconds. What has arrived outlasts a restart. SIGTERM ends it.

    \b
    Examples:
      openssl rand -hex 32 > token; chmod 600 token
      rose relay 10.0.0.7:7070 --folder /data/relay --token-file token
      rose relay trainer:7070 --folder /data/relay --token-file token \\
          --listen 0.0.0.0:7070 --certificates certificates
    """
    from rose.cli.relay import RelayOptions, relay_command

    relay_command(RelayOptions(upstream, folder, token_file, listen, keep, disk_gb, send_mb_s, certificates))


def scheduler(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file; flags come before its keys.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token, of mode 0600.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Loopback port; 0 takes any free one.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", metavar="N", help="Loopback port of its metrics; 0 takes any.")
    ] = None,
    certificates: Annotated[
        str | None,
        typer.Option("--certificates", metavar="DIR", help="Folder with ca.crt, tls.crt and tls.key: TLS both ways."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="First part of its id.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder that gets one output folder, with the log.")
    ] = None,
) -> None:
    """Give the turns of trajectories places on engines.

    One for each job. Engines are offered to it, rollout clients ask it for a lease per turn and then speak to the
    engine itself. It prints its address, is shown by `rose status`, and ends on SIGTERM. It keeps nothing on disk but
    its log: started again at the same port, it is told everything anew.

    \b
    The file, with its defaults:
      [scheduler]
      name = "scheduler"
      out = "runs"
      port = 0
      metrics_port = 0
      token_file = "token"    # no default
      certificates = ""
      [limits]
      beat_deadline_s = 3.0   # silence that makes an engine stale
      dead_after_s = 15.0     # and dead
      waiting = 4096          # leases that may wait at once
      engines = 1024
      trajectories = 32768    # remembered between turns
      ended = 16384           # leases remembered after their end
      retry_after_s = 1.0     # when to ask again if too many wait

    \b
    Examples:
      (umask 077; openssl rand -hex 32 > token)
      rose scheduler --token-file token --port 7080
      rose scheduler --config scheduler.toml
    """
    from rose.cli.scheduler import scheduler_command

    flags = {"token_file": token_file, "certificates": certificates, "port": port, "metrics_port": metrics_port}
    flags |= {"name": name, "out": out}
    scheduler_command(config, flags)
