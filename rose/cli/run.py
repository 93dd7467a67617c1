"""`rose run`: read the job, check the machine, then run it or say why not."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import typer
from rich.table import Table
from rich.text import Text

from rose.cli.terminal import console
from rose.config import Job, load_job
from rose.errors import ClusterError, ConfigError
from rose.machine import look
from rose.preflight import Check, preflight
from rose.processes import INTERRUPTED_STATUS
from rose.runs import runtime_root


def run_command(job_file: Path, *, out: Path | None, dry_run: bool, plain: bool) -> None:
    """Run a job file, or only show and check it.

    Raises ConfigError for a wrong job, ClusterError if the machine lacks something the job needs.
    """
    job = load_job(job_file, out=out)
    checks = job_checks(job)
    if dry_run:
        end_dry(job, checks)
    refuse_failed(job_file, checks)
    _run(job, plain=plain)


def job_checks(job: Job) -> list[Check]:
    """All of what a job needs of this machine."""
    return [*preflight(job, look(), runtime_root()), _environment(job)]


def end_dry(job: Job, checks: list[Check]) -> NoReturn:
    """Print the whole job and its checks; exit status 1 if one failed."""
    typer.echo(job.to_toml())
    console().print(check_table(checks))
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def refuse_failed(job_file: Path, checks: list[Check]) -> None:
    """Raises ConfigError if a check of the job failed, ClusterError if one of the machine did."""
    failed = [check for check in checks if not check.ok]
    if not failed:
        return
    lines = "".join(f"\n  {line}" for line in map(_line, failed))
    to_do = "mend the above; `--dry-run` shows every check"
    if any(check.of_job for check in failed):
        raise ConfigError(f"{job_file}: cannot run as it is{lines}", to_do=to_do)
    raise ClusterError(f"this machine cannot run the job{lines}", to_do=to_do)


def _run(job: Job, *, plain: bool) -> None:
    # Read when torch is imported. Threads that spin at barriers make an update several times slower as soon as an
    # engine or anything else shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rose.cli.live_view import LiveView
    from rose.cli.run_view import view_of
    from rose.trainer.run import run_job

    try:
        with LiveView(plain=plain) as view:
            run_job(
                job,
                changed=lambda recorder: view.update(view_of(recorder)),
                ended=view.finish,
            )
    except KeyboardInterrupt:
        leave_at_once()


def leave_at_once() -> NoReturn:
    """All of the run is closed; what is left are threads that nobody can end (the policy's loading, an environment's),
    and the interpreter would wait for them, or tear itself down beneath them.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED_STATUS)


def check_table(checks: list[Check]) -> Table:
    """The checks as a table, each failed one with what to do below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found", "needed"):
        table.add_column(column, overflow="fold")
    for check in checks:
        verdict = Text("ok", "green") if check.ok else Text("FAILED", "bold red")
        table.add_row(Text(check.name), verdict, Text(check.found), Text(check.needed))
        if not check.ok:
            table.add_row("", "", Text(f"to do: {check.to_do}", "yellow"), "")
    return table


def _environment(job: Job) -> Check:
    from rose.env.contract import load_environment

    needed = "a known environment that takes its params"
    try:
        load_environment(job.environment.kind, job.environment.params)
    except ConfigError as error:
        to_do = "; ".join(filter(None, (error.expected and f"expected {error.expected}", error.to_do)))
        return Check("environment", False, error.what, needed, to_do or "correct [environment]", of_job=True)
    return Check("environment", True, job.environment.kind, needed, of_job=True)


def _line(check: Check) -> str:
    return f"{check.name}: {check.found}; needed: {check.needed}; {check.to_do}"
