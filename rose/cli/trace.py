"""`rose trace`: one trajectory followed through the logs of all processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.cli.frame import printable
from rose.cli.terminal import console
from rose.cli.trail import LOG_FILE, Footprint, footprints, newest_run
from rose.errors import ConfigError

_NOT_SHOWN = {"timestamp", "level", "event", "part", "logger", "trajectory_id", "group_id", "lease_id"}
_LEVELS = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
_WIDEST = 600
"""Characters of one line's text: an environment may have put a whole page into it."""


def trace_command(trajectory_id: str, run: Path | None) -> None:
    """Print what the logs say of a trajectory of `run`, an output folder; by default the newest one in `runs`.

    Raises ConfigError if there is no such folder, or if no log speaks of the trajectory.
    """
    folder = run or newest_run(Path("runs"))
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"no run in {run or 'runs'}",
            expected="the output folder of a run",
            to_do="name it with --run; `rose status` and a run's last lines show it",
        )
    found = footprints(trajectory_id, folder.resolve())
    if not found:
        raise ConfigError(
            f"no log in {folder} speaks of {trajectory_id}",
            expected="the id of a trajectory, such as s1g0-0 or e0-0, or of a group, such as s1g0",
            to_do=f"see {folder / LOG_FILE} for the ids that there are",
        )
    console().print(story(trajectory_id, folder, found))


def story(trajectory_id: str, run: Path, found: Sequence[Footprint]) -> RenderableType:
    """`found` line by line: seconds since the first, the clock, whose log, and what happened."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    began_s = next((step.at_s for step in found if step.at_s), 0.0)
    for step in found:
        since = f"+{step.at_s - began_s:.3f} s" if step.at_s else ""
        clock = f"{datetime.fromtimestamp(step.at_s, UTC):%H:%M:%S}" if step.at_s else ""
        table.add_row(since, clock, printable(step.source), _told(step, trajectory_id))
    head = Text.assemble((printable(trajectory_id), "bold"), f"  {printable(run.name)}, {len(found)} lines")
    return Group(head, table)


def _told(step: Footprint, trajectory_id: str) -> Text:
    values = step.values
    if not values:
        return Text(printable(step.text)[:_WIDEST])
    event = Text(printable(str(values.get("event", ""))), _LEVELS.get(str(values.get("level")), ""))
    rest = "".join(f"  {printable(name)}={printable(value)}" for name, value in _shown(values, trajectory_id))
    return Text.assemble(event, (rest[:_WIDEST], "dim"))


def _shown(values: Mapping[str, Any], trajectory_id: str) -> Iterator[tuple[str, str]]:
    """What is not said already; a list of ids that it is in is counted, and those beside it are about others."""
    lists = {name for name, value in values.items() if isinstance(value, list)}
    holding = {name for name in lists if trajectory_id in values[name]}
    for name, value in values.items():
        if name in _NOT_SHOWN or value in (None, "", []) or (holding and name in lists - holding):
            continue
        yield name, f"{len(value)} with this one" if name in holding else str(value)
