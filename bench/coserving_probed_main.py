"""The serving engine of `coserving`: plain vLLM with the product's probe, and a stop-watch around that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.coserving_costs import PROBE_COSTS, CostsFile
from rose_executor.serving_probe import ServingProbe

_METHODS = ("record", "arrived", "left")
"""What steps and requests pay for. The beat between them is the same whatever the engine does."""


class StopWatch:
    """Around methods of one class. `seconds` of the thread's time were spent in them, however they call one another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._file = CostsFile(PROBE_COSTS)
        self._inside = False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(probe: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(probe, *args, **kwargs)
            began_s, self._inside = time.thread_time(), True
            try:
                return method(probe, *args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.thread_time() - began_s
                self._file.tell(probe_s=self.seconds)

        return timed


def watch() -> None:
    stopwatch = StopWatch()
    for name in _METHODS:
        setattr(ServingProbe, name, stopwatch.around(getattr(ServingProbe, name)))


if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    watch()
    main()
