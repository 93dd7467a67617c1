"""`rose weights`: what lies in a weight store, whether it is whole, and what changed between two versions.

The store is only read: a publisher may be writing to it meanwhile. Names come from the store and are shown as text.
The folder of a relay stands for the store in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.cli.frame import printable
from rose.cli.terminal import console
from rose_transfer.distribution import lineage
from rose_transfer.store import StoreReader
from rose_transfer.store.survey import ParameterChange, VersionRow, diff, listing, verify

FINGERPRINT_DIGITS = 12
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def list_command(folder: Path, *, as_json: bool) -> None:
    """Print the versions that are kept. Raises TransferError if `folder` is no store."""
    rows = listing(_reader(folder))
    if as_json:
        typer.echo(json.dumps([_plain_row(row) for row in rows], indent=2))
    else:
        console().print(render_listing(rows))


def verify_command(folder: Path, *, as_json: bool) -> None:
    """Read everything in the store and print what is wrong; ends with status 1 if something is.

    Raises TransferError if `folder` is no store.
    """
    store = _reader(folder)
    problems = verify(store)
    versions = store.versions()
    if as_json:
        typer.echo(json.dumps({"versions": versions, "problems": problems}, indent=2))
    else:
        for problem in problems:
            typer.echo(printable(problem))
        found = f"{len(problems)} problems" if problems else "all whole"
        typer.echo(f"{found}: {len(versions)} versions, {size(store.objects.used_bytes)} in {store.folder}")
    if problems:
        raise typer.Exit(1)


def diff_command(folder: Path, old: int, new: int, *, limit: int, as_json: bool) -> None:
    """Print which parameters changed from version `old` to `new`, those with most changes first; `limit` 0 for all.

    Raises TransferError if `folder` is no store, or if one of the versions cannot be had.
    """
    changes = sorted(diff(_reader(folder), old, new), key=lambda change: (-change.changed, change.parameter))
    if as_json:
        typer.echo(json.dumps([asdict(change) for change in changes[: limit or None]], indent=2))
    else:
        console().print(render_diff(changes, limit))


def render_listing(rows: Sequence[VersionRow]) -> RenderableType:
    """A row per version, for a terminal."""
    if not rows:
        return Text("no versions yet")
    table = _table("version", "fingerprint", "ways to it", "who joins fetches", "dense", "smallest step")
    for row in rows:
        ways = ", ".join(f"{size(count)} {'whole' if base is None else f'from {base}'}" for base, count in row.ways)
        steps = [count for base, count in row.ways if base is not None]
        cells = (
            str(row.version),
            row.fingerprint[:FINGERPRINT_DIGITS],
            ways or ("lost" if row.joiner_bytes is None else _way_back(row.version, rows)),
            "lost" if row.joiner_bytes is None else size(row.joiner_bytes),
            "?" if row.dense_bytes is None else size(row.dense_bytes),
            _times_smaller(row.dense_bytes, min(steps, default=None)),
        )
        table.add_row(*(Text(cell, "bold red" if cell == "lost" else "") for cell in cells))
    return table


def render_diff(changes: Sequence[ParameterChange], limit: int) -> RenderableType:
    """The first `limit` of the parameters that changed, all if that is 0, and the sums of all."""
    table = _table("changed", "of", "", "parameter")
    moved = [change for change in changes if change.changed]
    for change in moved[: limit or None]:
        table.add_row(*map(Text, _cells(change.changed, change.elements)), Text(printable(change.parameter)))
    changed, elements = sum(change.changed for change in changes), sum(change.elements for change in changes)
    table.add_row(*(Text(cell, "bold") for cell in _cells(changed, elements)), Text("all together", "bold"))
    left_out = len(moved) - len(moved[: limit or None])
    words = f"{len(moved)} of {len(changes)} parameters changed"
    return Group(table, Text(f"{words}, {left_out} not shown" if left_out else words, "dim"))


def size(count: int) -> str:
    """A number of bytes, in three digits from a KiB on."""
    if count < 1024:
        return f"{count} B"
    power = min(len(_UNITS), int(math.log(count, 1024)))
    scaled = count / 1024**power
    decimals = 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{scaled:.{decimals}f} {_UNITS[power - 1]}"


def figure(value: float) -> str:
    """A number in three digits, as people write them: 1,060 or 12.3 or 0.00123."""
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _reader(folder: Path) -> StoreReader:
    of_relay = folder / lineage.STORE
    return StoreReader(of_relay if (of_relay / "versions").is_dir() else folder)


def _plain_row(row: VersionRow) -> dict[str, Any]:
    return asdict(row) | {"ways": [{"base": base, "encoded_bytes": encoded} for base, encoded in row.ways]}


def _cells(changed: int, elements: int) -> tuple[str, str, str]:
    return f"{changed:,}", f"{elements:,}", f"{figure(100 * changed / max(1, elements))} %"


def _way_back(version: int, rows: Sequence[VersionRow]) -> str:
    """Of a version that no delta leads to: those that lead on from it, undone."""
    found = [f"{size(count)} back from {row.version}" for row in rows for base, count in row.ways if base == version]
    return ", ".join(found) or "back from one that is not kept"


def _times_smaller(dense_bytes: int | None, step_bytes: int | None) -> str:
    if not dense_bytes or not step_bytes:
        return ""
    return f"{figure(dense_bytes / step_bytes)} times smaller"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column in ("version", "who joins fetches", "dense", "changed", "of", "")
        table.add_column(column, overflow="fold", justify="right" if numeric else "left")
    return table
