"""A guest's scheduler as far as memory is concerned: what its pool does not use goes back, step by step.

Invariants
- What goes back is decided after requests were set back and before others get blocks, so what is in use fits.
- An idle guest goes on to look at its quota for as long as it holds anything. After `IDLE_KEEPS_S` it forgets its
  cached prefixes, gives all back and takes no more steps: an idle guest holds no keys and values.
- A paused engine, and one that is shutting down, is kept awake by nothing of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from rose_executor.counting_scheduler import Counting
from rose_executor.kv_backing import KvBacking, pick_kv_backing
from rose_executor.kv_pages import Idleness
from rose_executor.request_log import log_fact

_IDLE_LOOK_S = 0.01


class Keeping(Counting):
    """Mixed in before a vLLM scheduler, behind what keeps the quota and sets `kv_blocks_kept` to what it allows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_backing: KvBacking = pick_kv_backing(self.kv_cache_manager.block_pool)  # type: ignore[attr-defined]
        self.kv_blocks_kept = 0
        self._keeping_idle = Idleness()
        self._keeping_runs: Callable[[], bool] = lambda: True

    def attach_core(self, core: Any) -> None:
        """Its engine has loaded: from now on memory goes back. `core` is vLLM's engine core."""
        self._keeping_runs = core.is_running
        self.kv_backing.attach(core.collective_rpc)
        log_fact("keys and values", **self.kv_backing.describe().words())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        self._keeping_idle.saw(running + waiting, time.monotonic())
        if not running + waiting and self.kv_settled():
            time.sleep(_IDLE_LOOK_S)
        self.kv_backing.keep_within(self._resident_max())
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            self.kv_backing.scheduled()
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self.kv_backing.ended()
        return outputs

    def has_requests(self) -> bool:
        """The loop of an engine takes steps while there are any."""
        if super().has_requests():  # type: ignore[misc]
            return True
        unpaused: bool = self.pause_state == PauseState.UNPAUSED  # type: ignore[attr-defined]
        return self.kv_backing.holds and unpaused and self._keeping_runs()

    def kv_settled(self) -> bool:
        """Whether no step is needed for memory to go back."""
        return self.kv_backing.settled(self._resident_max())

    def _resident_max(self) -> int:
        return 0 if self._keeping_idle.lasts(time.monotonic()) else self.kv_blocks_kept
