"""`rose scheduler`: the placement service of one job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from rose_scheduler.config import load_config
from rose_scheduler.program import run_scheduler


def scheduler_command(config: Path | None, flags: Mapping[str, object]) -> None:
    """Serve until SIGTERM, which ends it with status 0, or Ctrl-C.

    Raises ConfigError for what cannot be used, ClusterError for a port or folder that cannot be had.
    """
    if not run_scheduler(load_config(config, flags), _tell):
        raise KeyboardInterrupt


def _tell(address: str, metrics_url: str) -> None:
    typer.echo(f"scheduler on {address}; metrics on {metrics_url}")
