"""A serving engine on CPU whose resident keys and values follow its use, for users who ask for it.

Loaded by `ROSE_SERVING_KV_SPARE=0.1` in the environment of the user's vLLM: then so large a share of its cache stays in
memory beyond what is used, for cached prefixes and for growth, and the pages of all other free blocks go back. Without
it a serving engine's whole cache is resident, and what a guest beside it gets is a fixed split.

Invariants
- Serving comes first: it is never refused a block that is free, and a step gives a bounded time, on the way down alone.
  Whatever goes wrong in here, this says so once, gives the pool back as it was, and serving goes on.
- An idle engine takes empty steps until its pages are back, and no more after that.
- What it really holds stands on the board, written by the engine core itself: nobody has to believe the user's setting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc

from rose.errors import EngineError
from rose_executor import vllm_contract, vllm_reliances
from rose_executor.board import SERVING_KV
from rose_executor.board_states import ServingKv
from rose_executor.engine_env import serving_board
from rose_executor.kept_half import KeptHalf
from rose_executor.kv_pages import KvPages

_TAKEN_PER_STEP = 512
_GIVING_S_PER_STEP = 0.001
_log = logging.getLogger("vllm.rose")


def install(spare: float) -> None:
    """Have the engine core of this process follow its use.

    It is hooked where it begins its loop: a core that is spawned loads its plugins in the middle of being made.
    """
    original: Callable[[Any], None] = EngineCoreProc.run_busy_loop

    @wraps(original)
    def looped(self: Any) -> None:
        try:
            vllm_contract.check(vllm_reliances.SERVING_KV)
            ServingKvKeeper(self, spare, serving_board()).hook()
        except Exception as error:  # noqa: BLE001 - serving first: nothing of ours may break it
            _log.warning("ROSE leaves the KV cache of this engine resident, serving goes on: %s", error)
        original(self)

    EngineCoreProc.run_busy_loop = looped


class ServingKvKeeper:
    """Of one engine core. Raises EngineError where its pages cannot go back. `off` says why they do no more."""

    def __init__(self, core: Any, spare: float, board: Path | None) -> None:
        if core.vllm_config.parallel_config.data_parallel_size > 1:
            raise EngineError("it is one of several engines", expected="one engine for each board")
        self.off = ""
        self._core = core
        self._scheduler: Any = core.scheduler
        pool = self._scheduler.kv_cache_manager.block_pool
        self._pages = KvPages(pool, _TAKEN_PER_STEP, _GIVING_S_PER_STEP)
        self._total_blocks: int = pool.num_gpu_blocks - 1
        self._spare = round(spare * self._total_blocks)
        self._half = None if board is None else KeptHalf(board, SERVING_KV, self._without_board)
        self._pages.attach(core.collective_rpc)
        if self._pages.off:
            self._pages.release()
            raise EngineError(self._pages.off)

    def hook(self) -> None:
        """Take part in the engine's steps."""
        schedule: Callable[..., Any] = self._scheduler.schedule
        update: Callable[..., Any] = self._scheduler.update_from_output
        has_requests: Callable[[], bool] = self._scheduler.has_requests

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            self._guarded(self._before_step)
            output = schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                self._pages.scheduled()
            return output

        def updated(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = update(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens:
                self._pages.ended()
            return outputs

        self._scheduler.schedule = scheduled
        self._scheduler.update_from_output = updated
        self._scheduler.has_requests = lambda: has_requests() or self._wants_step()

    def _wants_step(self) -> bool:
        if self.off or self._pages.settled(self._pages.spare_max(self._spare)):
            return False
        return bool(self._scheduler.pause_state == PauseState.UNPAUSED and self._core.is_running())

    def _before_step(self) -> None:
        self._pages.keep_spare(self._spare)
        if self._pages.off:
            raise EngineError(self._pages.off)
        self._tell()

    def _guarded(self, part: Callable[[], None]) -> None:
        if self.off:
            return
        try:
            part()
        except Exception as error:  # noqa: BLE001 - serving first: nothing of ours may break it
            self.off = str(error)
            _log.warning("ROSE leaves the KV cache of this engine resident from now on: %s", error)
            self._pages.release()
            if self._half is not None:
                self._half.close()

    def _tell(self) -> None:
        """Say on the board what is held."""
        if self._half is None:
            return
        now_s = time.monotonic()
        self._half.look(now_s)
        blocks, each = self._total_blocks, self._pages.block_bytes
        self._half.write(ServingKv(blocks * each, self._pages.resident_bytes, self._spare * each), now_s)

    def _without_board(self, why: str) -> None:
        _log.warning("ROSE has no board yet to tell of this engine's KV cache on: %s", why)
