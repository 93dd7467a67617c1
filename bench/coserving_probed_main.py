"""The serving engine of `coserving`: plain vLLM with the product's probe, and a stop-watch around the probe's methods.

Writes to the file in `BENCH_PROBE_COSTS`, about once a second, what the probe has cost in all, in seconds, and when each
request arrived here, of the monotonic clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose_executor.serving_probe import ServingProbe

COSTS = "BENCH_PROBE_COSTS"
_METHODS = ("record", "arrived", "left", "_beat")
_WRITE_EVERY_S = 1.0


class StopWatch:
    """Around methods of one class. `seconds` is spent in them in all, however they call one another."""

    def __init__(self, path: Path) -> None:
        self.seconds = 0.0
        self.arrived_at_s: list[float] = []
        self._path = path
        self._inside = False
        self._written_at_s = 0.0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(probe: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(probe, *args, **kwargs)
            began_s, self._inside = time.perf_counter(), True
            try:
                return method(probe, *args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began_s

        return timed

    def noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(probe: Any, request: int) -> Any:
            self.arrived_at_s.append(time.monotonic())
            return method(probe, request)

        return noted

    def written(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Around what is called again and again: the file is written behind it."""

        def writing(probe: Any) -> Any:
            method(probe)
            if time.monotonic() - self._written_at_s >= _WRITE_EVERY_S:
                self._written_at_s = time.monotonic()
                told = {"probe_s": self.seconds, "arrived_at_s": self.arrived_at_s}
                part = self._path.with_suffix(".part")
                part.write_text(json.dumps(told), encoding="utf-8")
                part.replace(self._path)

        return writing


def watch(path: Path) -> None:
    stopwatch = StopWatch(path)
    for name in _METHODS:
        setattr(ServingProbe, name, stopwatch.around(getattr(ServingProbe, name)))
    ServingProbe.arrived = stopwatch.noting(ServingProbe.arrived)  # type: ignore[method-assign]
    ServingProbe._beat = stopwatch.written(ServingProbe._beat)  # type: ignore[method-assign]


if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    watch(Path(os.environ[COSTS]))
    main()
