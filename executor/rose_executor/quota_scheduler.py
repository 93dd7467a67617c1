"""A guest's scheduler: takes its quota from the board at the top of each step, and keeps to it in that very step.

Invariants
- After `schedule` the blocks in use are within the quota, unless they belong to requests that cannot be set back yet.
- Requests set back are the newest of the lowest priority. They keep their tokens and compute their context anew.
- A quota is never taken by holding blocks: the pool says that fewer are free. Giving some back costs nothing, and the
  prefix cache stays what it was.
- With the gate shut the engine goes on to look at the board and to answer its owner; it computes nothing.
- Nobody to write quotas means no quota: a stale, torn or missing one shuts the gate. An engine whose board
  cannot even be opened does not start.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.errors import EngineError, RoseError
from rose_executor import vllm_contract
from rose_executor.board import GUEST, HEARTBEAT_S, QUOTA, BoardReader, HalfWriter
from rose_executor.board_states import GuestState, Quota
from rose_executor.counting_scheduler import Counting
from rose_executor.engine_env import EngineEnv
from rose_executor.quota import StarvedWatch, computes, shut, within

# With the gate shut vLLM's loop would come round every millisecond, and each round costs about as much processor time.
_LOOK_S = 0.002
_REOPEN_S = 0.2


class _Quota(Counting):
    """Mixed in before a vLLM scheduler; `Any` because vLLM's classes carry no types."""

    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = EngineEnv.read()
        if env is None or env.board is None:
            raise EngineError("the quota scheduler runs without a board", expected="an engine started as a guest")
        vllm_contract.check_attributes(self)
        self._guest_board = _GuestBoard(env.board)
        self._guest_pool: Any = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        self._guest_free_blocks: Callable[[], int] = self._guest_pool.get_num_free_blocks
        # Without the null block, which is never anybody's.
        blocks = self._guest_pool.num_gpu_blocks - 1
        self._guest_limits = Quota(blocks, self.max_num_scheduled_tokens, self.max_num_active_reqs, gate_open=True)
        self._guest_quota = shut(self._guest_limits)
        self._guest_starved = StarvedWatch()
        self._guest_cost = _StepCost(_clock(self.vllm_config))  # type: ignore[attr-defined]
        self._guest_steps = self._guest_preemptions = 0
        self._guest_pool.get_num_free_blocks = self._free_within_quota
        self._guest_pool.get_usage = self._usage

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._take_quota()
        if not computes(self._guest_quota) and not self._guest_cost.under_way:
            self._wait_at_the_gate()
        self._keep_to_quota()
        self._guest_cost.begins()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._guest_cost.scheduled(output.total_num_scheduled_tokens)
        self._report(output.total_num_scheduled_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._guest_cost.ended()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        # The pool refuses as long as not all of its blocks are free.
        with self._without_quota():
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def _take_quota(self) -> None:
        quota = self._guest_board.quota(time.monotonic())
        self._guest_quota = shut(self._guest_quota) if quota is None else within(quota, self._guest_limits)

    def _wait_at_the_gate(self) -> None:
        """Stay here a little while nothing may be computed, and leave as soon as something may."""
        deadline_s = time.monotonic() + HEARTBEAT_S / 2
        while not computes(self._guest_quota) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            self._take_quota()

    def _keep_to_quota(self) -> None:
        self.max_num_scheduled_tokens = self._guest_quota.tokens_per_step if self._guest_quota.gate_open else 0
        self.max_num_active_reqs = self._guest_quota.active_seqs
        while self._used_blocks() > self._guest_quota.kv_blocks or len(self.running) > self._guest_quota.active_seqs:
            request = self._newest_lowest()
            if request is None:
                return
            self._set_back(request)

    def _newest_lowest(self) -> Any:
        """The running request to set back next, None if there is none whose blocks can be freed now."""
        candidates = (one for one in self.running if self._request_blocks_can_be_freed(one))  # type: ignore[attr-defined]
        return max(candidates, key=lambda one: (one.priority, one.arrival_time), default=None)

    def _set_back(self, request: Any) -> None:
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=self.requires_kv_delivery)  # type: ignore[attr-defined]
        # As vLLM does when it sets requests back between steps: a resumed one is then sent to the worker whole.
        self.prev_step_scheduled_req_ids.discard(request.request_id)  # type: ignore[attr-defined]
        self._guest_preemptions += 1

    def _report(self, scheduled_tokens: int) -> None:
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        self._guest_steps += 1
        self._guest_starved.stepped(
            wanted=running + waiting > 0,
            allowed=computes(self._guest_quota),
            scheduled_tokens=scheduled_tokens,
            now_s=time.monotonic(),
        )
        self._guest_board.report(
            GuestState(
                steps=self._guest_steps,
                computed_steps=self._guest_cost.steps,
                quota_number=self._guest_board.quota_number,
                running=running,
                waiting=waiting,
                kv_blocks_used=self._used_blocks(),
                kv_blocks_total=self._guest_limits.kv_blocks,
                step_s=self._guest_cost.seconds,
                step_tokens=self._guest_cost.tokens,
                preemptions=self._guest_preemptions,
                starved_at_s=self._guest_starved.since_s,
                starvations=self._guest_starved.count,
                busy_s=self._guest_cost.busy_s,
            )
        )

    def _used_blocks(self) -> int:
        return self._guest_limits.kv_blocks - self._guest_free_blocks()

    def _free_within_quota(self) -> int:
        return max(0, self._guest_quota.kv_blocks - self._used_blocks())

    def _usage(self) -> float:
        """As a pool says it without a quota: the share of all blocks that are in use."""
        return self._used_blocks() / max(1, self._guest_limits.kv_blocks)

    @contextlib.contextmanager
    def _without_quota(self) -> Iterator[None]:
        self._guest_pool.get_num_free_blocks = self._guest_free_blocks
        try:
            yield
        finally:
            self._guest_pool.get_num_free_blocks = self._free_within_quota


class QuotaScheduler(_Quota, Scheduler):  # type: ignore[misc]
    """For guests on CPU."""


class QuotaAsyncScheduler(_Quota, AsyncScheduler):  # type: ignore[misc]
    """For guests on GPU: a plain scheduler would silently switch asynchronous scheduling off."""


class _GuestBoard:
    """The guest's side of the board: never raises once it is open, and follows a board that was made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = BoardReader(path)
        self._writer = HalfWriter(path, GUEST)
        self._look_again_s = 0.0
        self.quota_number = 0

    def quota(self, now_s: float) -> Quota | None:
        """The quota in force, None if there is none that can be trusted."""
        reading = self._reader.read(QUOTA, now_s)
        if reading.state is None and now_s >= self._look_again_s:
            self._look_again_s = now_s + _REOPEN_S
            self._follow()
        self.quota_number = 0 if reading.state is None else reading.number
        return reading.state

    def report(self, state: GuestState) -> None:
        """A board that cannot be written keeps the gate shut soon enough: its quota cannot be renewed either."""
        with contextlib.suppress(OSError):
            self._writer.write(state)

    def _follow(self) -> None:
        if not self._reader.replaced():
            return
        with contextlib.suppress(RoseError):
            reader, writer = BoardReader(self._path), HalfWriter(self._path, GUEST)
            self._reader.close()
            self._writer.close()
            self._reader, self._writer = reader, writer


class _StepCost:
    """What the last of `steps` that computed something cost, and all of them together.

    With asynchronous scheduling steps overlap, so a step's cost begins where the one before it ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: deque[tuple[float, int]] = deque()
        self._began = self._ended = 0.0
        self.seconds = self.busy_s = 0.0
        self.tokens = self.steps = 0

    @property
    def under_way(self) -> bool:
        """Whether a step computes now."""
        return bool(self._under_way)

    def begins(self) -> None:
        self._began = self._clock()

    def scheduled(self, tokens: int) -> None:
        if tokens:
            self._under_way.append((self._began, tokens))

    def ended(self) -> None:
        began, self.tokens = self._under_way.popleft()
        now = self._clock()
        self.seconds = now - max(began, self._ended)
        self.busy_s += self.seconds
        self._ended = now
        self.steps += 1


def _clock(config: Any) -> Callable[[], float]:
    """The clock of a step's cost: processor time where this very thread computes on the CPU, else time that passes."""
    from vllm.platforms import current_platform

    computes_here = config.parallel_config.distributed_executor_backend == "uni"
    return time.thread_time if current_platform.is_cpu() and computes_here else time.perf_counter
