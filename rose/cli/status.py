"""`rose status`: every run and service of this user, their parts, and their named waits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rose.cli.frame import printable
from rose.cli.terminal import console
from rose.cli.together import together
from rose.errors import ConfigError
from rose.run_names import short_names
from rose.runs import list_runs, runtime_root
from rose.status import Fact, Liveness, Page, RunStatus, alike, read_status, whom

REFRESH_S = 1.0
_COLOURS = {Liveness.LIVE: "green", Liveness.STALE: "yellow", Liveness.DEAD: "red"}


def status_command(*, as_json: bool, watch: bool) -> None:
    """Print the status of every run once, or again and again until Ctrl-C.

    Raises ConfigError for --json with --watch, ClusterError if the runtime folder cannot be used.
    """
    if as_json and watch:
        raise ConfigError("--json and --watch together", expected="one of them", to_do="call --json in a loop instead")
    root = runtime_root()
    if as_json:
        typer.echo(json.dumps([_plain(one) for one in _look(root)], indent=2))
    elif watch:
        _watch(root)
    else:
        console().print(render(root, _look(root), time.time()))


def _look(root: Path) -> list[RunStatus]:
    now_s = time.time()
    return [read_status(run, now_s) for run in list_runs(root)]


def _plain(status: RunStatus) -> dict[str, Any]:
    return {**asdict(status), "page": status.page and status.page.model_dump()}


def _watch(root: Path) -> None:
    with suppress(KeyboardInterrupt), Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(render(root, _look(root), time.time()), refresh=True)
            time.sleep(REFRESH_S)


def render(root: Path, runs: list[RunStatus], now_s: float) -> RenderableType:
    """All runs as of `now_s`, for a terminal: those that belong together in one block, the dead after the others."""
    if not runs:
        return Text(f"no runs (looked in {root})")
    alive = [one for one in runs if one.liveness is not Liveness.DEAD]
    dead = [one for one in runs if one.liveness is Liveness.DEAD]
    return Group(*(_block(group, now_s) for group in together(alive)), *(_dead(one) for one in dead))


def _block(group: list[RunStatus], now_s: float) -> RenderableType:
    """One table of parts and one of waits for all services of a job."""
    heads: list[RenderableType] = []
    pages: dict[str, Page] = {}
    names = short_names(status.run_id for status in group) if len(group) > 1 else {}
    for status in group:
        heads.append(_head(status))
        if status.page is not None:
            heads.append(_facts(status.page))
            pages[names.get(status.run_id, "")] = status.page
    if not pages:
        return Group(*heads, Text())
    return Group(*heads, _parts(pages, now_s), _waits(pages, now_s), Text())


def _dead(status: RunStatus) -> RenderableType:
    return Group(_head(status), *([] if status.page is None else [_last_words(status.page)]), Text())


def _head(status: RunStatus) -> Text:
    return Text.assemble(
        (printable(status.run_id), "bold"),
        "  ",
        (status.liveness.value, _COLOURS[status.liveness]),
        f"  {_said(status)}",
    )


def _last_words(page: Page) -> RenderableType:
    """What a dead run last said, as what was: no address that answers, no state that holds, no deadline to come."""
    kept = {key: value for key, value in page.facts.items() if not str(value).startswith("http")}
    said = [f"  when it last spoke:{_pairs(kept)}"] if kept else []
    said += [f"  {printable(f'{part.name} was {part.state}  {part.detail}'.rstrip())}" for part in page.parts]
    said += [f"  waited for {printable(f'{group[0].what} from {whom(group)}')}" for group in alike(page.waits)]
    return Text("\n".join(said), "dim")


def _said(status: RunStatus) -> str:
    if status.page is None or status.age_s is None:
        return printable(status.problem)
    pid = "was pid" if status.liveness is Liveness.DEAD else "pid"
    text = f"{pid} {status.page.pid}, said {status.age_s:.0f} s ago, output {printable(status.page.output)}"
    if status.page.write_failures:
        text += f", {status.page.write_failures} status writes failed"
    return text


def _facts(page: Page) -> RenderableType:
    return Padding(Text(_pairs(page.facts).lstrip(), "dim"), (0, 0, 0, 2))


def _pairs(facts: Mapping[str, Fact]) -> str:
    return "".join(f"  {printable(key)}={_value(value)}" for key, value in facts.items())


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _parts(pages: Mapping[str, Page], now_s: float) -> RenderableType:
    """`pages` by what their services are called here."""
    if not any(page.parts for page in pages.values()):
        return Text("  no part has reported yet")
    table = _table("part", "state", "for", "detail")
    for name, page in pages.items():
        for place, part in enumerate(page.parts):
            row = (part.name, part.state, _seconds(now_s - part.since_s), part.detail)
            table.add_row(_named(name, place), *(Text(printable(cell)) for cell in row))
    return table


def _waits(pages: Mapping[str, Page], now_s: float) -> RenderableType:
    if not any(page.waits for page in pages.values()):
        return Text("  waits for nothing")
    table = _table("waits for", "from", "for", "deadline")
    for name, page in pages.items():
        for place, group in enumerate(alike(page.waits)):
            oldest, first_due = group[0], min(wait.deadline_s for wait in group)
            left_s = first_due - now_s
            deadline = f"in {_seconds(left_s)}" if left_s >= 0 else f"{_seconds(-left_s)} ago"
            cells = (oldest.what, whom(group), _seconds(now_s - oldest.since_s))
            table.add_row(
                _named(name, place),
                *(Text(printable(cell)) for cell in cells),
                Text(deadline, "" if left_s >= 0 else "bold red"),
            )
    return table


def _named(name: str, place: int) -> Text:
    """A service is named once, at the first of its rows."""
    return Text("" if place else printable(name), "dim")


def _table(*columns: str) -> Table:
    table = Table("", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _seconds(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
