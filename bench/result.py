"""The one writer of bench files.

Invariants
- A file says what was run (command, commit, uncommitted changes), on what (machine, packages), every single run,
  and what follows from the runs; the headline figures stand at the top level and are medians.
- A target is met or missed; a figure that was not measured is null and misses its target, unless it was left out
  on request, which the file says.
- Written whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.stats import iqr
from rose.errors import ClusterError
from rose.machine import look

ROOT = Path(__file__).resolve().parent.parent
GIT_TIMEOUT_S = 30
Run = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Target:
    """What a headline figure must be."""

    figure: str
    comparison: Literal[">=", "<=", "=="]
    value: float

    def met_by(self, found: float | None) -> bool:
        if found is None:
            return False
        if self.comparison == ">=":
            return found >= self.value
        return found <= self.value if self.comparison == "<=" else found == self.value

    def __str__(self) -> str:
        return f"{self.figure} {self.comparison} {self.value:g}"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All that was measured. `runs` hold one mapping of figures each; `left_out` figures were not asked for."""

    bench: str
    command: str
    commit: str
    dirty: bool
    runs: Sequence[Run]
    headline: Sequence[str]
    targets: Sequence[Target]
    left_out: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def figures(self) -> dict[str, float | None]:
        """The median of each headline figure over the runs that have it."""
        return {name: _median(self._values(name)) for name in self.headline if name not in self.left_out}

    def missed(self) -> list[Target]:
        figures = self.figures()
        return [
            target
            for target in self.targets
            if target.figure not in self.left_out and not target.met_by(figures.get(target.figure))
        ]

    def to_json(self) -> dict[str, Any]:
        """Raises ValueError if a headline figure has the name of one of the file's own keys."""
        figures = self.figures()
        missed = self.missed()
        own: dict[str, Any] = {
            "bench": self.bench,
            "command": self.command,
            "commit": self.commit,
            "dirty": self.dirty,
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "note": self.note,
            "left_out": dict(self.left_out),
            "targets": [
                {
                    "figure": target.figure,
                    "target": f"{target.comparison} {target.value:g}",
                    "found": figures.get(target.figure),
                    "met": target not in missed,
                }
                for target in self.targets
                if target.figure not in self.left_out
            ],
            "targets_met": not missed,
            "figures": {name: _summary(self._values(name)) for name in self._names()},
            "runs": [{name: _finite(value) for name, value in run.items()} for run in self.runs],
            "machine": asdict(look()),
        }
        if clash := own.keys() & figures.keys():
            raise ValueError(f"figures named like the file's own keys: {sorted(clash)}")
        return {**figures, **own}

    def write(self, path: Path) -> None:
        """Raises ClusterError if the file cannot be written; an older one is then still whole."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                temporary = Path(file.name)
                try:
                    file.write(text)
                    file.flush()
                    os.chmod(temporary, 0o644)
                    os.replace(temporary, path)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise ClusterError(
                f"{path} could not be written: {error.strerror}", to_do="name another file with --json"
            ) from error

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run))

    def _values(self, name: str) -> list[float]:
        found = [_finite(run.get(name)) for run in self.runs]
        return [value for value in found if value is not None]


def git_state(root: Path = ROOT) -> tuple[str, bool]:
    """(commit, uncommitted changes?); ("unknown", True) outside a repository."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return "unknown", True


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
    )
    return done.stdout.strip()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """`spread` is the distance between the quartiles."""
    if not values:
        return {"runs": 0, "median": None, "min": None, "max": None, "spread": None}
    return {
        "runs": len(values),
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "spread": iqr(values),
    }
