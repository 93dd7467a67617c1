"""`rose demo`: check trace, job and machine, then direct it or say why not."""

from __future__ import annotations

from pathlib import Path

import typer

from rose.cli.run import end_dry, job_checks, leave_at_once, refuse_failed
from rose.demo.director import run_demo
from rose.demo.plan import TRACE, demo_checks, planned_job, planned_load, shipped_plan
from rose.machine import look


def demo_command(*, out: Path | None, dry_run: bool, plain: bool, trace: str | None) -> None:
    """Run the demo; ends with the exit status of its run.

    Raises ConfigError for a wrong trace, ClusterError if the machine lacks something, RoseError for what ended it.
    """
    plan = shipped_plan(out or Path("runs"), trace=TRACE if trace is None else trace, plain=plain)
    load, job = planned_load(plan.load), planned_job(plan)
    checks = [*job_checks(job), *demo_checks(plan, job, look())]
    if dry_run:
        slower = f"slower, if serving alone would take more than {plan.share:.0%} of its core"
        for line in (f"{load.name}: {load.attribution}", *load.history, slower):
            typer.echo(line)
        end_dry(job, checks)
    refuse_failed(plan.job, checks)
    try:
        status = run_demo(plan, typer.echo)
    except KeyboardInterrupt:
        leave_at_once()
    if status:
        raise typer.Exit(max(1, status))  # a negative one is a signal's
