"""What a serving vLLM loads to be seen: a stat logger, by vLLM's public entry point `vllm.stat_logger_plugins`.

Invariants
- Serving comes first: whatever goes wrong in here, the probe says so once, switches itself off, and serving goes on.
  So it does if its own calls take too long (`probe_cost`), for whatever reason, such as a slow file system.
- Without `ROSE_SERVING_BOARD` it does nothing. Where there is no board to write on (`kept_half`), it looks for one
  between steps, never in one; why there is none is said once, for it may be a folder that never comes.
- The half of the board is renewed while the engine idles, by the loop that also answers its clients: if that stands
  still, the half grows stale, and so does whoever trusts it.

vLLM tells its stat loggers of a request after the step that took it in; `serving_arrivals` tells of it as it arrives. A
board is for one device, so only the first of several engines behind one server writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from vllm.v1.metrics.loggers import StatLoggerBase

from rose_executor import serving_arrivals, vllm_contract, vllm_reliances
from rose_executor.board import HEARTBEAT_S, SERVING
from rose_executor.board_states import ServingState
from rose_executor.engine_env import serving_board, serving_profile
from rose_executor.kept_half import KeptHalf
from rose_executor.probe_cost import ProbeCost
from rose_executor.profile_store import begun_profile
from rose_executor.serving_steps import ServingSteps

_BEAT_EARLY_S = 0.005
_log = logging.getLogger("vllm.rose")
_M = TypeVar("_M", bound=Callable[..., None])


def _never_hurting(method: _M) -> _M:
    """Let a method of the probe switch it off instead of raising into the serving engine, or of keeping it."""

    @wraps(method)
    def guarded(self: ServingProbe, *args: Any, **kwargs: Any) -> None:
        if self.off:
            return
        began_s, at_work = time.perf_counter(), self.at_work
        try:
            method(self, *args, **kwargs)
            if at_work or self.at_work:
                self._paid(time.perf_counter() - began_s)
        except Exception as error:  # noqa: BLE001 - serving first: nothing of ours may break it
            self.switch_off(str(error))

    return guarded  # type: ignore[return-value]


class ServingProbe(StatLoggerBase):  # type: ignore[misc]
    """One engine's stat logger. `off` says why the probe does nothing any more, "" while it works.

    `half` is what it writes, None where no board is named.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.off = ""
        self._config = vllm_config
        path = serving_board()
        self.half = None if path is None else KeptHalf(path, SERVING, self._without_board)
        self._steps: ServingSteps | None = None
        self._written_at_s = 0.0
        self._beating = False
        self._cost = ProbeCost()
        if self.half is None:
            self.off = "no board is named"
        elif engine_index > 0:
            self.off = "a board is for one device"
        self._begin()

    @property
    def at_work(self) -> bool:
        """Whether the engine owes anybody anything, as far as it was told."""
        return self._steps is not None and not self._steps.state.idle

    @_never_hurting
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """The engine has finished a step; either statistics may be missing."""
        if scheduler_stats is None:
            return
        generated = prompt_tokens = first_tokens = finished = 0
        if iteration_stats is not None:
            generated = iteration_stats.num_generation_tokens
            prompt_tokens = iteration_stats.prompt_token_stats.computed
            first_tokens = len(iteration_stats.time_to_first_tokens_iter)
            finished = len(iteration_stats.finished_requests)
        counted = self._counted()
        now_s = time.monotonic()
        state = counted.stepped(
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_usage=scheduler_stats.kv_cache_usage,
            tokens=generated + prompt_tokens,
            prompt_tokens=prompt_tokens,
            first_tokens=first_tokens,
            finished=finished,
            now_s=now_s,
        )
        self._write(state, now_s)
        self._keep_beating()

    @_never_hurting
    def arrived(self, request: int) -> None:
        """A request is there, which the engine has not taken in yet."""
        now_s = time.monotonic()
        self._write(self._counted().arrived(request, now_s), now_s)

    @_never_hurting
    def left(self, request: int) -> None:
        """It is over. The board hears of it with the next step or beat: this can only make room."""
        self._counted().left(request)

    @_never_hurting
    def log_engine_initialized(self) -> None:
        """vLLM knows its KV cache from now on."""
        self._counted()
        self._keep_beating()

    def switch_off(self, why: str) -> None:
        """Do nothing from now on. The half on the board grows stale: nobody takes an old state for the present one."""
        self.off = why
        _log.warning("ROSE's probe is off, serving goes on: %s", why)
        if self.half is not None:
            self.half.close()

    @_never_hurting
    def _begin(self) -> None:
        vllm_contract.check(vllm_reliances.PROBE)
        serving_arrivals.tell(self)

    def _paid(self, seconds: float) -> None:
        why = self._cost.spent(seconds, self._counted().state.busy_s)
        if why:
            self.switch_off(why)

    def _write(self, state: ServingState, now_s: float) -> None:
        if self.half is not None and self.half.write(state, now_s):
            self._written_at_s = now_s

    def _counted(self) -> ServingSteps:
        if self._steps is None:
            # Without the null block, which is never anybody's.
            cache = self._config.cache_config
            blocks, profile = max(0, (cache.num_gpu_blocks or 1) - 1), begun_profile(serving_profile())
            self._steps = ServingSteps(blocks, time.monotonic(), cache.block_size, profile)
        return self._steps

    def _keep_beating(self) -> None:
        if not self._beating:
            self._beating = True
            self._beat()

    @_never_hurting
    def _beat(self) -> None:
        now_s = time.monotonic()
        if self.half is not None and self.half.look(now_s):
            self._written_at_s = 0.0  # whether it takes anything is tried here, and not in a step
        # A step that was just reported is as good a beat.
        rest_s = self._written_at_s + HEARTBEAT_S - now_s
        if rest_s < _BEAT_EARLY_S:
            self._write(self._counted().state, now_s)
            rest_s = HEARTBEAT_S
        asyncio.get_running_loop().call_later(rest_s, self._beat)

    def _without_board(self, why: str) -> None:
        _log.warning("ROSE's probe has no board to write on yet: %s", why)
