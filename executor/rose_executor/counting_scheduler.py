"""vLLM's scheduler, writing every token that it accepts to the token page, and every ended request to the log.

The page also says for how many tokens there is KV memory, and what one of a context costs to compute: a guest knows
that from its step profile, other engines learn it (`Costing`).

Invariants
- Counted is what `_update_request_with_output` keeps: trimmed at the stop, without drafts that were rejected
  and without the stale output of a preempted request, that is exactly the tokens that go out to the client.
- A token is on the page before the step's outputs leave the engine core, so a client can never have
  received more than the page says.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.errors import EngineError
from rose_executor.engine_env import EngineEnv
from rose_executor.page_writer import PageWriter
from rose_executor.request_id import external_request_id
from rose_executor.request_log import log_ended
from rose_executor.residing import Residing
from rose_executor.step_meter import StepMeter
from rose_executor.step_shape import StepShape
from rose_executor.token_cost import TokenCost
from rose_executor.token_page import page_slots

TELL_EVERY = 16
"""Steps: whoever asks what a token costs looks some times a second."""


class Counting(Residing):
    """Mixed in before a vLLM scheduler; `Any` because vLLM's classes carry no types."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = EngineEnv.read()
        if env is None:
            raise EngineError(
                "the counting scheduler runs without a token page",
                expected="an engine started by ROSE",
                to_do="leave --scheduler-cls away for engines of your own",
            )
        max_num_seqs: int = self.max_num_running_reqs  # type: ignore[attr-defined]
        self.token_page = PageWriter(
            env.token_page,
            incarnation=env.incarnation,
            slots=page_slots(max_num_seqs),
            version=env.weight_version,
        )
        # Without the null block, which is never anybody's.
        blocks: int = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # type: ignore[attr-defined]
        self._counting_kv_tokens = blocks * self.block_size  # type: ignore[attr-defined]
        self.tell(0.0)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self.token_page.stepped()
        return outputs

    def tell(self, token_s: float) -> None:
        """What a token of a context costs to compute by now, for the page."""
        self.token_page.tell(kv_tokens=self._counting_kv_tokens, token_s=token_s)

    def _update_request_with_output(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        kept, stopped = super()._update_request_with_output(request, *args, **kwargs)  # type: ignore[misc]
        self.token_page.add(external_request_id(request.request_id), len(kept))
        return kept, stopped

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        request_id = external_request_id(request.request_id)
        log_ended(
            request_id,
            self.token_page.finish(request_id),
            arrived_s=request.arrival_time,
            set_back=request.num_preemptions,
            why=str(request.get_finished_reason()),
        )
        return super()._free_request(request, *args, **kwargs)


class Costing(Counting):
    """Learns what a token costs, too: for engines that have nothing else to do with what their steps cost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._costing = TokenCost()
        self._costing_meter = StepMeter(time.monotonic)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._costing_meter.begins()
        planned = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._costing_meter.scheduled(StepShape(planned.total_num_scheduled_tokens, len(planned.num_scheduled_tokens)))
        return planned

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            meter = self._costing_meter
            meter.ended()
            self._costing.saw(meter.shape.tokens, meter.shape.seqs, meter.seconds)
            if meter.steps % TELL_EVERY == 0:
                self.tell(self._costing.token_s)
        return outputs


class CountingScheduler(Costing, Scheduler):  # type: ignore[misc]
    """For CPU engines."""


class CountingAsyncScheduler(Costing, AsyncScheduler):  # type: ignore[misc]
    """For GPU engines: a plain scheduler would silently switch asynchronous scheduling off."""
