"""What our part of both engines costs: their stop-watches write it to files, about once a second."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

STEP_COSTS = "BENCH_STEP_COSTS"
PROBE_COSTS = "BENCH_PROBE_COSTS"
"""Environment variables: where the guest's scheduler and the serving engine's probe write."""
_WRITE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds so far: of our part of the guest's steps, of all these steps, and of the probe's methods."""

    ours_s: float = 0.0
    step_s: float = 0.0
    probe_s: float = 0.0

    def since(self, before: Costs) -> Costs:
        return Costs(self.ours_s - before.ours_s, self.step_s - before.step_s, self.probe_s - before.probe_s)


class CostsFile:
    """Told again and again, written now and then. Does nothing where the variable is not set."""

    def __init__(self, variable: str) -> None:
        path = os.environ.get(variable)
        self._path = None if path is None else Path(path)
        self._written_at_s = time.monotonic()

    def tell(self, **seconds: float) -> None:
        if self._path is None or time.monotonic() - self._written_at_s < _WRITE_EVERY_S:
            return
        self._written_at_s = time.monotonic()
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(seconds), encoding="utf-8")
        part.replace(self._path)


def read_costs(steps: Path, probe: Path) -> Costs:
    """As of a second ago or so; noughts where nothing was told yet."""
    told = _read(steps) | _read(probe)
    return Costs(told.get("ours_s", 0.0), told.get("step_s", 0.0), told.get("probe_s", 0.0))


def _read(path: Path) -> dict[str, float]:
    try:
        told: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return told
