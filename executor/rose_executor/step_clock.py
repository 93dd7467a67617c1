"""Which clock tells what a step costs the serving engine beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def step_clock(config: Any) -> Callable[[], float]:
    """Processor time where this very thread computes on the CPU, else time that passes; `config` is vLLM's."""
    from vllm.platforms import current_platform

    computes_here = config.parallel_config.distributed_executor_backend == "uni"
    return time.thread_time if current_platform.is_cpu() and computes_here else time.perf_counter
