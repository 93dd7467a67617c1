"""A scheduler for `rose profile`: writes each step that computed something to a file.

Invariants
- A step is written when its outputs are taken, as one line: what it had to do, and what it cost.
- What a step costs is counted as a guest counts it (`step_clock`), and a step that overlaps with the one before it
  begins where that one ended.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.errors import EngineError
from rose_executor.counting_scheduler import Counting
from rose_executor.engine_env import EngineEnv
from rose_executor.step_clock import step_clock
from rose_executor.step_log import SeenStep, StepLogWriter
from rose_executor.step_meter import StepMeter
from rose_executor.step_shape import scheduled_shape


class _Recording(Counting):
    """Mixed in before a vLLM scheduler; `Any` because vLLM's classes carry no types."""

    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = EngineEnv.read()
        if env is None or env.step_log is None:
            raise EngineError("the recording scheduler runs without a file", expected="an engine to be profiled")
        self._record = StepLogWriter(env.step_log)
        self._record_meter = StepMeter(step_clock(self.vllm_config))  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._record_meter.begins()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._record_meter.scheduled(scheduled_shape(self.requests, output.num_scheduled_tokens))
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._record_meter.ended()
            self._record.write(SeenStep(self._record_meter.shape, self._record_meter.seconds))
        return outputs


class RecordingScheduler(_Recording, Scheduler):  # type: ignore[misc]
    """For CPU engines."""


class RecordingAsyncScheduler(_Recording, AsyncScheduler):  # type: ignore[misc]
    """For GPU engines: a plain scheduler would silently switch asynchronous scheduling off."""
