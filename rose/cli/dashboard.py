"""`rose dashboard`: the ops page of all that runs here."""

from __future__ import annotations

from pathlib import Path

import typer

from rose.errors import ConfigError


def dashboard_command(port: int, out: Path) -> None:
    """Serve until SIGTERM, which ends it with status 0, or Ctrl-C.

    Raises ConfigError if what it is served with is not installed, ClusterError for a port or folder that cannot be had.
    """
    try:
        from rose.dashboard.program import run_dashboard
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs {error.name}, which is not installed",
            expected="the extra `dashboard`",
            to_do="pip install 'rose-rl[dashboard]'",
        ) from error
    if not run_dashboard(port, out, _tell):
        raise KeyboardInterrupt


def _tell(page: str) -> None:
    typer.echo(f"dashboard at {page}")
