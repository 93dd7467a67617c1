"""vLLM's own scheduler and KV cache on virtual time: all of an engine but its model, whose steps cost what is said.

Invariants
- What is scheduled, cached, evicted and preempted is decided by vLLM's own code, with our mix-in for kept prefixes.
- A step costs `fixed_s`, `sequence_s` for each sequence in it, and `token_s` for each token that it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rose.demo.serving_model import warm_start
from rose_executor.keep_prefix import Keep
from rose_executor.residing import Residing

BLOCK_TOKENS = 16


class ResidingScheduler(Residing, Scheduler):  # type: ignore[misc]
    """As in our rollout engines, without a page to count on."""


@dataclass(frozen=True, slots=True)
class StepCost:
    fixed_s: float
    token_s: float
    sequence_s: float = 0.0


FOUND = StepCost(fixed_s=0.004, token_s=0.00013, sequence_s=0.0002)
"""By the engine of `kv`."""


class VirtualEngine:
    """`kv_tokens` of memory. `step` computes one step, and says what it cost."""

    def __init__(self, kv_tokens: int, cost: StepCost = FOUND, *, seqs: int = 64, batch_tokens: int = 1024) -> None:
        import torch

        blocks = kv_tokens // BLOCK_TOKENS + 1
        self.cost = cost
        self.generated = self.asked_tokens = self.found_tokens = self.preemptions = 0
        self._done: dict[str, tuple[int, Callable[[list[int]], None]]] = {}
        self._outputs: dict[str, list[int]] = {}
        scheduling = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=batch_tokens,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        config = VllmConfig(
            scheduler_config=scheduling,
            model_config=ModelConfig(model=str(warm_start()), dtype="float32", seed=0, skip_tokenizer_init=True),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler: Any = ResidingScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def submit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        answer_tokens: int,
        done: Callable[[list[int]], None],
        keep: Keep | None = None,
    ) -> None:
        """`done` is called with the answer when the step that ends it is over."""
        parameters = SamplingParams(
            max_tokens=answer_tokens, ignore_eos=True, extra_args=None if keep is None else keep.extra_args()
        )
        request = Request(request_id, list(token_ids), parameters, None, block_hasher=self._hasher)
        self._done[request_id] = (answer_tokens, done)
        self._outputs[request_id] = []
        self.scheduler.add_request(request)

    def step(self) -> tuple[float, list[Callable[[], None]]]:
        """Compute one; what it cost, and what is to be called when that time is over."""
        planned = self.scheduler.schedule()
        ids = list(planned.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([_token(request_id, len(self._outputs[request_id]))] if whole else [])
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        ended: list[Callable[[], None]] = []
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for one in outputs.outputs:
                answer = self._outputs[one.request_id]
                answer.extend(one.new_token_ids)
                self.generated += len(one.new_token_ids)
                if one.finished:
                    _, done = self._done.pop(one.request_id)
                    del self._outputs[one.request_id]
                    ended.append(_calling(done, answer))
            stats = outputs.scheduler_stats
            if stats is not None:
                self.asked_tokens += stats.prefix_cache_stats.queries
                self.found_tokens += stats.prefix_cache_stats.hits
                self.preemptions += stats.prefix_cache_stats.preempted_requests
        cost = self.cost
        seconds = cost.fixed_s + cost.token_s * planned.total_num_scheduled_tokens + cost.sequence_s * len(ids)
        return seconds, ended


def _calling(done: Callable[[list[int]], None], answer: list[int]) -> Callable[[], None]:
    return lambda: done(answer)


def _token(request_id: str, at: int) -> int:
    return 5 + hash((request_id, at)) % 379
