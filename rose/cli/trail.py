"""What all logs of a run say of one trajectory, in the order in which it happened.

Invariants
- A line is about a trajectory if it holds its id, or the id of one of its requests, as a whole: `s1g0-1` is neither in
  `s1g0-10` nor in `as1g0-1`.
- Ids are unique in a run and not among runs: logs of services beside it count only while the run was going on.
- A line without a time of its own (vLLM's, a traceback) stands where it stood in its file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rose.run_names import short_name

JOB_FILE = "job.toml"
LOG_FILE = "log.jsonl"
_LOGS = ("*.jsonl", "*.log")
_TAIL_BYTES = 1 << 16
_AFTER_S = 30.0
"""How long after the run's last line a service may still speak of it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """One line: when (`time.time()`, 0 if nothing before it in its file had a time), whose log, and what it says.

    `values` are those of a JSON line; another line is `text` alone.
    """

    at_s: float
    source: str
    text: str
    values: dict[str, Any]


def newest_run(out: Path) -> Path | None:
    """The run under `out` that was written to last; one may lie in the folder of the service that started it."""
    runs = [job.parent for pattern in (f"*/{JOB_FILE}", f"*/*/{JOB_FILE}") for job in out.glob(pattern)]
    return max(runs, key=_written_s, default=None)


def footprints(trajectory_id: str, run: Path) -> list[Footprint]:
    """Of the run in the output folder `run` and the services beside it."""
    about = _About(trajectory_id)
    found = [step for path in _logs_within(run) for step in _read(path, _source(path, run, "run"), about)]
    first_s, last_s = _span(run / LOG_FILE)
    for path in _logs_beside(run):
        if _file_written_s(path) >= first_s:
            beside = _read(path, _source(path, run.parent, short_name(run.parent.name)), about)
            found.extend(step for step in beside if first_s <= step.at_s <= last_s + _AFTER_S)
    return sorted(found, key=lambda step: step.at_s)


def _logs_within(folder: Path) -> list[Path]:
    return sorted(path for pattern in _LOGS for path in folder.rglob(pattern) if path.is_file())


def _logs_beside(run: Path) -> Iterator[Path]:
    """Of services in folders beside the run's, and of the one in whose folder it lies; of no other run."""
    for pattern in _LOGS:
        yield from sorted(run.parent.glob(pattern))
    for folder in sorted(run.parent.iterdir()):
        if folder.is_dir() and not folder.is_symlink() and folder != run:
            runs = {job.parent for job in folder.rglob(JOB_FILE)}
            yield from (path for path in _logs_within(folder) if runs.isdisjoint(path.parents))


def _source(path: Path, base: Path, itself: str) -> str:
    """The service or part whose log it is, without times and random parts: engine-0, scheduler, executor/guest.

    `itself` is what a log of `base` itself is called.
    """
    folders = [short_name(part) for part in path.parent.relative_to(base).parts]
    name = [] if path.name == LOG_FILE else [path.stem]
    return "/".join((*folders, *name)) or itself


class _About:
    """Whether a line is about a trajectory."""

    def __init__(self, trajectory_id: str) -> None:
        self._id = trajectory_id.encode()
        self._whole = re.compile(rb"(?<![\w.-])" + re.escape(self._id) + rb"(?![\w-])")

    def __call__(self, line: bytes) -> bool:
        return self._id in line and self._whole.search(line) is not None  # the first is cheap, and seldom so


def _read(path: Path, source: str, about: _About) -> Iterator[Footprint]:
    """What a file that vanishes, or cannot be read on, has said until then."""
    timed = b""
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            is_json = line.startswith(b"{") and line.endswith(b"}\n")
            if is_json:
                timed = line  # Only where it is needed is its time read: that takes ten times as long as the search.
            if about(line):
                values = _values(line) if is_json else {}
                at_s = _at_s(values or _values(timed))
                yield Footprint(at_s, source, "" if values else line.decode(errors="replace").strip(), values)


def _values(line: bytes) -> dict[str, Any]:
    """Of a JSON line; none of a line that is torn or no JSON."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _at_s(values: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(values.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0


def _span(log: Path) -> tuple[float, float]:
    """When the first line was written and when the last: of everything there is, if that cannot be told."""
    try:
        with log.open("rb") as file:
            first = file.readline()
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            times = [_at_s(_values(line)) for line in file.read().splitlines()]
    except OSError:
        return 0.0, math.inf
    return _at_s(_values(first)), max(times, default=0.0) or math.inf


def _written_s(folder: Path) -> float:
    log = folder / LOG_FILE
    return _file_written_s(log if log.exists() else folder)


def _file_written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
