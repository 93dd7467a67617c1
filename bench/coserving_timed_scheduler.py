"""A guest's scheduler with a stop-watch around what is ours in a step: quota, slack, board, memory and the token page.

Both are counted in processor time of the thread that schedules, which on CPU computes the step as well: waiting for the
core is no cost of ours.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from bench.coserving_costs import STEP_COSTS, CostsFile
from rose_executor.engine_env import STEP_LOG
from rose_executor.guest_trail import GuestTrail
from rose_executor.quota_scheduler import QuotaKeeping
from rose_executor.step_shape import StepShape


class _Theirs:
    """Stands behind our mixins and before vLLM's scheduler: what is spent from here on is not ours."""

    theirs_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.theirs_s += time.thread_time() - began_s

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        try:
            return super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.theirs_s += time.thread_time() - began_s


class _Trail(GuestTrail):
    """What the bench has a guest write down is no cost of the product's."""

    def __init__(self, scheduler: _Theirs, path: Path | None) -> None:
        super().__init__(path)
        self._scheduler = scheduler

    def planned(self, *planned: Any) -> None:
        began_s = time.thread_time()
        super().planned(*planned)
        self._scheduler.theirs_s += time.thread_time() - began_s

    def ended(self, shape: StepShape, seconds: float) -> None:
        began_s = time.thread_time()
        super().ended(shape, seconds)
        self._scheduler.theirs_s += time.thread_time() - began_s


class TimedQuotaScheduler(QuotaKeeping, _Theirs, Scheduler):  # type: ignore[misc]
    """Counts steps that compute something, each from planning to its outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timed_file = CostsFile(STEP_COSTS)
        self._guest_trail = _Trail(self, Path(os.environ[STEP_LOG]))
        self._timed_step_s = self._timed_ours_s = self._timed_began_s = self._timed_plan_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._timed_began_s, theirs_s = time.thread_time(), self.theirs_s
        output = super().schedule(*args, **kwargs)
        self._timed_plan_s = time.thread_time() - self._timed_began_s - (self.theirs_s - theirs_s)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        began_s, theirs_s = time.thread_time(), self.theirs_s
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        ended_s = time.thread_time()
        if scheduler_output.total_num_scheduled_tokens:
            self._timed_step_s += ended_s - self._timed_began_s
            self._timed_ours_s += self._timed_plan_s + ended_s - began_s - (self.theirs_s - theirs_s)
            self._timed_file.tell(ours_s=self._timed_ours_s, step_s=self._timed_step_s)
        return outputs
