"""A guest's scheduler: takes quota and slack from the board at the top of each step, and keeps to them in this step.

Invariants
- After `schedule` the blocks in use are within the quota, unless they belong to requests that cannot be set back yet.
- No step computes more tokens than the slack of the moment allows: serving is asked on this machine, by this process.
- Requests set back are the newest of the lowest priority. They keep their tokens and compute their context anew. One
  that is kept from computing for too long, or was set back too often, is given back to its client, with its tokens.
- A quota is never taken by holding blocks: the pool says that fewer are free. Giving some back costs nothing, and the
  prefix cache stays what it was.
- With the gate shut the engine goes on to look at the board and to answer its owner; it computes nothing.
- Nobody to write quotas means no quota: a stale, torn or missing one shuts the gate. An engine whose board
  cannot even be opened does not start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.errors import EngineError
from rose_executor.board import HEARTBEAT_S
from rose_executor.board_states import GuestState, Quota
from rose_executor.counting_scheduler import TELL_EVERY
from rose_executor.engine_env import EngineEnv
from rose_executor.guest_admission import GuestAdmission, Pending
from rose_executor.guest_board import GuestBoard
from rose_executor.guest_trail import GuestTrail
from rose_executor.kv_keeping import Keeping
from rose_executor.profile_store import begun_profile
from rose_executor.quota import StarvedWatch
from rose_executor.stalled import Stalled
from rose_executor.step_clock import step_clock
from rose_executor.step_meter import StepMeter
from rose_executor.step_shape import scheduled_shape

# With the gate shut vLLM's loop would come round every millisecond, and each round costs about as much processor time.
_LOOK_S = 0.002
_MOVE_EVERY_S = 0.1


class QuotaKeeping(Keeping):
    """Mixed in before a vLLM scheduler; `Any` because vLLM's classes carry no types."""

    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = EngineEnv.read()
        if env is None or env.board is None:
            raise EngineError("the quota scheduler runs without a board", expected="an engine started as a guest")
        self._guest_board = GuestBoard(env.board)
        self._guest_pool: Any = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        self._guest_free_blocks: Callable[[], int] = self._guest_pool.get_num_free_blocks
        # Without the null block, which is never anybody's.
        blocks = self._guest_pool.num_gpu_blocks - 1
        limits = Quota(blocks, self.max_num_scheduled_tokens, self.max_num_active_reqs, gate_open=True)
        self._guest_admission = GuestAdmission(limits, time.monotonic(), begun_profile(env.step_profile))
        self._guest_meter = StepMeter(step_clock(self.vllm_config))  # type: ignore[attr-defined]
        self._guest_trail = GuestTrail(env.step_log)
        self._guest_stalled = Stalled()
        self._guest_starved = StarvedWatch()
        self._guest_given_back: list[Any] = []
        available = self.kv_backing.available_blocks
        self._guest_available = None if available == self._guest_free_blocks else available
        self._guest_shortfall = -blocks
        self._guest_steps = self._guest_preemptions = self._guest_moved = 0
        self._guest_moved_at_s = time.monotonic()
        self._guest_pool.get_num_free_blocks = self._free_within_quota
        self._guest_pool.get_usage = self._usage

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        if not self._guest_admission.open and not self._guest_meter.under_way:
            self._wait_at_the_gate()
        self._keep_to_quota()
        planned_at_s = time.monotonic()
        self._guest_meter.begins()
        output = super().schedule(*args, **kwargs)
        self._guest_meter.scheduled(scheduled_shape(self.requests, output.num_scheduled_tokens))  # type: ignore[attr-defined]
        if output.total_num_scheduled_tokens:
            admission = self._guest_admission
            self._guest_trail.planned(planned_at_s, admission.arrivals, self._used_blocks(), admission.quota.kv_blocks)
        self._give_back_stalled(output.num_scheduled_tokens)
        self._report(output.total_num_scheduled_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            meter = self._guest_meter
            meter.ended()
            self._guest_trail.ended(meter.shape, meter.seconds)
            self._guest_admission.computed(meter.shape, meter.seconds, time.monotonic())
            if meter.steps % TELL_EVERY == 0:
                self.tell(self._guest_admission.profile.token_s)
        self._tell_given_back(outputs)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        # The pool refuses as long as not all of its blocks are free.
        with self._without_quota():
            return super().reset_prefix_cache(*args, **kwargs)

    def _look(self) -> None:
        now_s = time.monotonic()
        self._guest_admission.look(self._guest_board.look(now_s), now_s, self._pending())
        self.kv_blocks_kept = self._guest_admission.quota.kv_blocks
        self._guest_shortfall = self.kv_blocks_kept - self._guest_admission.limits.kv_blocks

    def _pending(self) -> Pending:
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        last = self._guest_meter.shape
        return Pending(max(1, running + waiting), last.context_tokens + last.tokens, self._guest_meter.under_way)

    def _wait_at_the_gate(self) -> None:
        """Stay here a little while nothing may be computed, and leave as soon as something may."""
        deadline_s = time.monotonic() + HEARTBEAT_S / 2
        while not self._guest_admission.open and self.kv_settled() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            self._look()

    def _keep_to_quota(self) -> None:
        admission = self._guest_admission
        self.max_num_scheduled_tokens = admission.allowed.tokens_per_step
        self.max_num_active_reqs = admission.seqs_kept
        while self._used_blocks() > admission.quota.kv_blocks or len(self.running) > admission.seqs_kept:
            request = self._newest_lowest()
            if request is None:
                return
            self._set_back(request)

    def _newest_lowest(self) -> Any:
        """The running request to set back next, None if there is none whose blocks can be freed now."""
        candidates = (one for one in self.running if self._request_blocks_can_be_freed(one))  # type: ignore[attr-defined]
        return max(candidates, key=lambda one: (one.priority, one.arrival_time), default=None)

    def _set_back(self, request: Any) -> None:
        request_id = request.request_id
        if self._guest_admission.quota.move_after_s and not self._guest_stalled.may_set_back(request_id):
            self._give_back([request_id])
            return
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=self.requires_kv_delivery)  # type: ignore[attr-defined]
        # As vLLM does when it sets requests back between steps: a resumed one is then sent to the worker whole.
        self.prev_step_scheduled_req_ids.discard(request_id)  # type: ignore[attr-defined]
        self._guest_stalled.set_back(request_id)
        self._guest_preemptions += 1

    def _give_back_stalled(self, scheduled: dict[str, int]) -> None:
        now_s = time.monotonic()
        self._guest_stalled.stepped(scheduled, now_s=now_s)
        if now_s - self._guest_moved_at_s < _MOVE_EVERY_S:
            return
        self._guest_moved_at_s = now_s
        requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
        self._give_back(self._guest_stalled.due(requests, self._guest_admission.quota.move_after_s, now_s))

    def _give_back(self, request_ids: list[str]) -> None:
        """End requests here; their clients, told so with the step's outputs, go on with them elsewhere."""
        if request_ids:
            ended = self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined]
            self._guest_given_back += ended
            self._guest_moved += len(ended)

    def _tell_given_back(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for request in self._guest_given_back:
            to_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            to_client.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
        self._guest_given_back = []

    def _report(self, scheduled_tokens: int) -> None:
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        admission, meter, starved = self._guest_admission, self._guest_meter, self._guest_starved
        profile, drift = admission.profile, admission.profile.drifted
        starved.stepped(
            wanted=running + waiting > 0,
            allowed=admission.open,
            scheduled_tokens=scheduled_tokens,
            now_s=time.monotonic(),
        )
        self._guest_steps += 1
        self._guest_board.report(
            GuestState(
                steps=self._guest_steps,
                computed_steps=meter.steps,
                quota_number=admission.quota_number,
                running=running,
                waiting=waiting,
                kv_blocks_used=self._used_blocks(),
                kv_blocks_total=admission.limits.kv_blocks,
                kv_blocks_resident=self.kv_backing.resident_blocks,
                kv_gives_back=not self.kv_backing.off,
                step_s=meter.seconds,
                step_tokens=meter.shape.tokens,
                step_seqs=meter.shape.seqs,
                step_context_tokens=meter.shape.context_tokens,
                busy_s=meter.busy_s,
                slack_s=admission.slack_s,
                allowed_tokens=admission.allowed.tokens_per_step,
                allowed_seqs=admission.allowed.active_seqs,
                open_s=admission.open_s,
                preemptions=self._guest_preemptions,
                moved=self._guest_moved,
                starved_at_s=starved.since_s,
                starvations=starved.count,
                profile_steps=profile.steps,
                step_margin=profile.margin,
                drifted_at_s=0.0 if drift is None else drift.since_s,
                drift_factor=0.0 if drift is None else drift.factor,
            )
        )

    def _used_blocks(self) -> int:
        return self._guest_admission.limits.kv_blocks - self._guest_free_blocks()

    def _free_within_quota(self) -> int:
        """Asked for each request in each step, so it says no more than it must."""
        free = self._guest_free_blocks() + self._guest_shortfall
        if self._guest_available is not None:
            free = min(free, self._guest_available())
        return free if free > 0 else 0

    def _usage(self) -> float:
        """As a pool says it without a quota: the share of all blocks that are in use."""
        return self._used_blocks() / max(1, self._guest_admission.limits.kv_blocks)

    @contextlib.contextmanager
    def _without_quota(self) -> Iterator[None]:
        self._guest_pool.get_num_free_blocks = self._guest_free_blocks
        try:
            yield
        finally:
            self._guest_pool.get_num_free_blocks = self._free_within_quota


class QuotaScheduler(QuotaKeeping, Scheduler):  # type: ignore[misc]
    """For guests on CPU."""


class QuotaAsyncScheduler(QuotaKeeping, AsyncScheduler):  # type: ignore[misc]
    """For guests on GPU: a plain scheduler would silently switch asynchronous scheduling off."""
