"""What each subcommand of `rose` takes.

Only typer is imported before a command is known, so that help answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder for output folders, in place of run.out.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the whole job and check this machine; run nothing.")
]
PlainOption = Annotated[bool, typer.Option("--plain", help="One line per step in place of the live view.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a weight store.")]

_UNITS_MAX = 1e9
"""No disk and no link is as large in gigabytes, or megabytes per second; what is endless is above it."""
_COUNT_MAX = 10**9
_VERSION_MAX = 2**63 - 1


class Shown:
    """What the user asked to see of an error; set while the command line is read."""

    traceback = False


def _show_traceback(wanted: bool) -> None:
    Shown.traceback = wanted


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rose {version('rose-rl')}")
        raise typer.Exit


@app.callback()
def _rose(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_show_traceback)
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning on the idle capacity of GPUs that serve.

    \b
    Examples:
      rose doctor                     what this machine has, and what it lacks
      rose demo                       the smallest real job, a few minutes
      rose run job.toml --dry-run     check a job before running it
      rose run job.toml
      rose status --watch             what all runs are doing, and waiting for
      rose dashboard                  the same in a browser, with charts
      rose trace s3g0-1               what all logs say of one trajectory
    """


@app.command()
def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Job file; `rose job-file` explains its keys.")],
    dry_run: DryRunOption = False,
    out: OutOption = None,
    plain: PlainOption = False,
) -> None:
    """Run a job.

    \b
    Ctrl-C once stops it cleanly, twice at once.
    Examples:
      rose run job.toml --dry-run
      rose run job.toml --out /data/runs --plain
    """
    from rose.cli.run import run_command

    run_command(job_file, out=out, dry_run=dry_run, plain=plain)


@app.command()
def demo(dry_run: DryRunOption = False, out: OutOption = Path("runs"), plain: PlainOption = False) -> None:
    """Run the demo: a small model learns FrozenLake.

    A few minutes on two CPU cores.

    \b
    Examples:
      rose demo
      rose demo --out /tmp/runs
    """
    from rose.cli.run import demo_command

    demo_command(out=out, dry_run=dry_run, plain=plain)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Say what this machine has and lacks.

    Each missing feature is shown with what its absence costs.
    """
    from rose.cli.doctor import doctor_command

    doctor_command(as_json=json)


@app.command("job-file")
def job_file() -> None:
    """Explain every key of a job file.

    Markdown: default, bounds and meaning of each.
    """
    from rose.cli.job_page import job_page

    typer.echo(job_page(), nl=False)


@app.command()
def relay(
    upstream: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Publisher or relay to follow.")],
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where versions are kept.")],
    token_file: Annotated[Path, typer.Option("--token-file", metavar="FILE", help="File with the shared token.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Serve here.")] = "127.0.0.1:7070",
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1, max=_COUNT_MAX, help="Versions to keep.")] = 16,
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
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="Use TLS upstream, and trust this certificate.")
    ] = None,
    cert: Annotated[Path | None, typer.Option("--cert", metavar="FILE", help="Serve with TLS: certificate.")] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Serve with TLS: its key.")] = None,
) -> None:
    """Pass weights on to the engines near by.

    The link to the publisher carries each version once, however many engines there are here. A line is printed for
    each version: bytes received, and seconds. What has arrived outlasts a restart. SIGTERM ends it.

    \b
    Examples:
      openssl rand -hex 32 > token; chmod 600 token
      rose relay 10.0.0.7:7070 --folder /data/relay --token-file token
      rose relay trainer:7070 --folder /data/relay --token-file token --ca ca.pem \\
          --listen 0.0.0.0:7070 --cert cert.pem --key key.pem
    """
    from rose.cli.relay import RelayOptions, relay_command

    relay_command(RelayOptions(upstream, folder, token_file, listen, keep, disk_gb, send_mb_s, ca, cert, key))


@app.command()
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

    flags = {"token_file": token_file, "port": port, "metrics_port": metrics_port, "name": name, "out": out}
    scheduler_command(config, flags)


weights = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(weights, name="weights")


@weights.callback()
def _weights() -> None:
    """Look into a weight store: versions, damage, changes.

    The store may be in use; nothing is written to it.

    \b
    Examples:
      rose weights ls /data/weights             versions, and what it takes to get them
      rose weights verify /data/weights         read everything; status 1 if something is wrong
      rose weights diff /data/weights 6 7       which parameters changed most
    """


@weights.command("ls")
def weights_ls(folder: FolderArgument, json: JsonOption = False) -> None:
    """List the versions and what leads to them."""
    from rose.cli.weights import list_command

    list_command(folder, as_json=json)


@weights.command("verify")
def weights_verify(folder: FolderArgument, json: JsonOption = False) -> None:
    """Read everything and say what is wrong.

    Ends with status 1 if something is. Takes as long as reading all deltas and rebuilding all versions.
    """
    from rose.cli.weights import verify_command

    verify_command(folder, as_json=json)


@weights.command("diff")
def weights_diff(
    folder: FolderArgument,
    old: Annotated[int, typer.Argument(metavar="OLD", min=0, max=_VERSION_MAX, help="Version to start from.")],
    new: Annotated[int, typer.Argument(metavar="NEW", min=0, max=_VERSION_MAX, help="Version to compare it with.")],
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, max=_COUNT_MAX, help="Parameters to show; 0 for all.")
    ] = 20,
    json: JsonOption = False,
) -> None:
    """Count the elements that changed, by parameter.

    Those with most changes come first.
    """
    from rose.cli.weights import diff_command

    diff_command(folder, old, new, limit=limit, as_json=json)
