"""vLLM's scheduler, keeping cached prefixes whose owners come back: see `kv_residency` for the order in which they go.

A request says so in its sampling parameters (`keep_prefix`).

Invariants
- Only what was answered to its end is kept. After a reset of the cache nothing is.
- Where the pool is not vLLM's own, nothing is kept: kvcached has an order of its own.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from vllm.v1.request import RequestStatus

from rose_executor.keep_prefix import read_keep
from rose_executor.kv_residency import ResidentQueue

_EXPIRE_EVERY_S = 1.0
_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Residing:
    """Mixed in before a vLLM scheduler; `Any` because vLLM's classes carry no types."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool: Any = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        self._residing: ResidentQueue | None = None
        self._residing_expire_at_s = 0.0
        if type(pool).__name__ == "BlockPool":
            pool.free_block_queue = self._residing = ResidentQueue(pool.free_block_queue)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._residing is not None:
            self._keep(self._residing, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self.forget_kept()
        return done

    def forget_kept(self) -> None:
        """Nothing that is cached now will be asked for again."""
        if self._residing is not None:
            self._residing.forget_all()

    def _keep(self, residing: ResidentQueue, request: Any) -> None:
        now_s = time.monotonic()
        parameters = request.sampling_params
        said = read_keep(None if parameters is None else parameters.extra_args)
        residing.forget(said.forget)
        if now_s >= self._residing_expire_at_s:
            self._residing_expire_at_s = now_s + _EXPIRE_EVERY_S
            residing.expire(now_s)
        # Behind keys and values of an old version it is found by this very request alone (`kept_kv`).
        if said.name and request.status in _ANSWERED and request.cache_salt is None:
            groups = self.kv_cache_manager.get_blocks(request.request_id).blocks  # type: ignore[attr-defined]
            cached = [one for one in itertools.chain(*groups) if one.block_hash is not None and not one.is_null]
            residing.keep(said.name, said.rank, now_s + said.seconds, cached)
