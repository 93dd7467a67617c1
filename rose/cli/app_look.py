"""What the commands take that look and change nothing. Like `app`, it imports nothing before the command is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose.cli.app_options import JsonOption


def status(
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until Ctrl-C.")] = False,
) -> None:
    """Show your runs, and what each waits for.

    \b
    live   running and reporting
    stale  running, but silent for more than 10 s
    dead   gone without cleaning up; the next run sweeps it away
    """
    from rose.cli.status import status_command

    status_command(as_json=json, watch=watch)


def dashboard(
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65_535, help="Loopback port; 0 takes any free one.")
    ] = 0,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder that gets one output folder, with the log.")
    ] = Path("runs"),
) -> None:
    """Show in a browser what runs here.

    One page for all your services on this machine: serving against its SLO, what is lent and why not, runs, weight
    versions, waits. It prints its address, which answers on this machine alone; from another one, forward the port:
    ssh -L 8700:127.0.0.1:8700 HOST. It changes nothing. SIGTERM ends it.

    \b
    Examples:
      rose dashboard
      rose dashboard --port 8700
    """
    from rose.cli.dashboard import dashboard_command

    dashboard_command(port, out)


def trace(
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="Its id, such as s3g0-1; a group's works too.")
    ],
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Output folder of the run; the newest in runs/ if left out."),
    ] = None,
) -> None:
    """Follow one trajectory through all logs.

    Lines of the run, its scheduler, engines and environments, and of the executors and other services whose folders
    lie beside the run's, in the order in which it happened.

    \b
    Examples:
      rose trace s3g0-1
      rose trace e0-17 --run /data/runs/frozen-lake-20260801-120344-1f0a
    """
    from rose.cli.trace import trace_command

    trace_command(trajectory, run)


def doctor(json: JsonOption = False) -> None:
    """Say what this machine has and lacks.

    Each missing feature is shown with what its absence costs.
    """
    from rose.cli.doctor import doctor_command

    doctor_command(as_json=json)


def job_file() -> None:
    """Explain every key of a job file.

    Markdown: default, bounds and meaning of each.
    """
    from rose.cli.job_page import job_page

    typer.echo(job_page(), nl=False)
