"""A guest's scheduler with a stop-watch around what is ours in a step, the token page included.

Writes to the file in `BENCH_STEP_COSTS`, about once a second, the seconds that steps took in all, and those of them that
were spent in our part of the scheduler.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rose_executor.quota_scheduler import QuotaScheduler

COSTS = "BENCH_STEP_COSTS"
_WRITE_EVERY_S = 1.0


class _Theirs:
    """Stands behind our mixins and before vLLM's scheduler: what is spent from here on is not ours."""

    theirs_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.theirs_s += time.perf_counter() - began_s

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.theirs_s += time.perf_counter() - began_s


class TimedQuotaScheduler(QuotaScheduler.__mro__[1], _Theirs, Scheduler):  # type: ignore[misc]
    """Counts steps that compute something; of those, all that passes from planning to the outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timed_steps = 0
        self._timed_step_s = self._timed_ours_s = self._timed_began_s = self._timed_plan_s = 0.0
        self._timed_written_at_s = time.monotonic()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._timed_began_s, theirs_s = time.perf_counter(), self.theirs_s
        output = super().schedule(*args, **kwargs)
        self._timed_plan_s = time.perf_counter() - self._timed_began_s - (self.theirs_s - theirs_s)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        began_s, theirs_s = time.perf_counter(), self.theirs_s
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        ended_s = time.perf_counter()
        if scheduler_output.total_num_scheduled_tokens:
            self._timed_steps += 1
            self._timed_step_s += ended_s - self._timed_began_s
            self._timed_ours_s += self._timed_plan_s + ended_s - began_s - (self.theirs_s - theirs_s)
            self._write()
        return outputs

    def _write(self) -> None:
        if time.monotonic() - self._timed_written_at_s < _WRITE_EVERY_S:
            return
        self._timed_written_at_s = time.monotonic()
        path = Path(os.environ[COSTS])
        told = {"steps": self._timed_steps, "step_s": self._timed_step_s, "ours_s": self._timed_ours_s}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(told), encoding="utf-8")
        part.replace(path)
