"""What `rose run` and `rose demo` take. Like `app`, it imports nothing before the command is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose.cli.app_options import DryRunOption, OutOption, PlainOption


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


def demo(
    dry_run: DryRunOption = False,
    out: OutOption = Path("runs"),
    plain: PlainOption = False,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="TRACE", help="What serving bears: a file, or a shipped one.")
    ] = None,
) -> None:
    """Run the demo: a small model learns on what a serving engine leaves.

    A serving engine bears a minute of a real trace alone, then again and again while it lends its idle time to the
    rollouts of a small model that learns FrozenLake. Some four minutes on two CPU cores, longer on slow ones.

    \b
    Examples:
      rose demo
      rose demo --out /tmp/runs --plain
      rose demo --trace azure_2023_code
    """
    from rose.cli.demo import demo_command

    demo_command(out=out, dry_run=dry_run, plain=plain, trace=trace)
