"""The command line of `rose`: what stands before a subcommand, and which there are.

Only typer is imported before a command is known, so that help answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rose.cli.app_executor import HELP as EXECUTOR_HELP
from rose.cli.app_executor import executor
from rose.cli.app_look import dashboard, doctor, job_file, status, trace
from rose.cli.app_profile import HELP as PROFILE_HELP
from rose.cli.app_profile import profile
from rose.cli.app_run import demo, run
from rose.cli.app_services import relay, scheduler
from rose.cli.app_weights import weights

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


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
      rose profile MODEL              what an engine's steps cost on it
      rose demo                       the whole in small, some four minutes
      rose run job.toml --dry-run     check a job before running it
      rose run job.toml
      rose status --watch             what all runs are doing, and waiting for
      rose dashboard                  the same in a browser, with charts
      rose trace s3g0-1               what all logs say of one trajectory
    """


app.command()(run)
app.command()(demo)
app.command()(status)
app.command()(dashboard)
app.command()(trace)
app.command()(doctor)
app.command("job-file")(job_file)
app.command()(relay)
app.command()(scheduler)
app.command(help=EXECUTOR_HELP)(executor)
app.command(help=PROFILE_HELP)(profile)
app.add_typer(weights, name="weights")
