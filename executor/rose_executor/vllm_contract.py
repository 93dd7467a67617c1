"""What ROSE relies on inside vLLM and vLLM does not promise: checked by name before it is used.

`RELIED_ON` is checked at every start of an engine, `QUOTA_RELIES_ON` as well where it is a guest: one on a vLLM that
moved any of these must not start, for it would count wrongly or update wrongly, and say nothing. `TRACING_RELIES_ON` is
checked before a layout is traced, `BACKEND_RELIES_ON` before the weight transfer backend is offered, `PROBE_RELIES_ON`
before a serving engine is probed, `SERVING_KV_RELIES_ON` before one gives memory back. Written for vLLM 0.32.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from rose.errors import EngineError

Reliance = tuple[str, str, tuple[str, ...]]
"""(module, dotted name, parameters that must exist)"""

RELIED_ON: tuple[Reliance, ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler._update_request_with_output", ("request", "new_token_ids")),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_request_with_output", ("request", "new_token_ids")),
    ("vllm.v1.core.block_pool", "BlockHashToBlockMap", ()),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock.reset_hash", ()),
    ("vllm.v1.request", "Request.update_block_hashes", ()),
    ("vllm.v1.request", "Request.get_finished_reason", ()),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method", "args")),
    ("vllm.v1.engine.core", "EngineCore.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.engine.core", "EngineCore.set_weight_version", ("weight_version",)),
    ("vllm.v1.engine.core", "EngineCoreProc.pause_scheduler", ("mode", "clear_cache")),
    ("vllm.v1.engine.core", "EngineCore.resume_scheduler", ()),
    ("vllm.v1.engine.core", "EngineCore.is_scheduler_paused", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("method",)),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    ("vllm.model_executor.models.registry", "_run_in_subprocess", ("fn",)),
    ("vllm.utils.system_utils", "get_mp_context", ()),
    ("vllm.config", "CUDAGraphMode.NONE", ()),
    ("vllm.distributed.parallel_state", "get_tp_group", ()),
    ("vllm.distributed.parallel_state", "get_pp_group", ()),
)

QUOTA_RELIES_ON: tuple[Reliance, ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_request_counts", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", ("request", "timestamp", "drop_stale_output")),
    ("vllm.v1.core.sched.scheduler", "Scheduler._request_blocks_can_be_freed", ("request",)),
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ()),
    ("vllm.v1.core.block_pool", "BlockPool.get_usage", ()),
    ("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.has_requests", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.pause_state", ()),
    ("vllm.v1.core.sched.interface", "PauseState.UNPAUSED", ()),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method", "args")),
    ("vllm.v1.engine.core", "EngineCoreProc.is_running", ()),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.initialize_kv_cache", ("kv_cache_config",)),
)
"""For guests; the attributes of a scheduler that they also need are `QUOTA_READS`."""

SERVING_KV_RELIES_ON: tuple[Reliance, ...] = (
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ()),
    ("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.has_requests", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.pause_state", ()),
    ("vllm.v1.core.sched.interface", "PauseState.UNPAUSED", ()),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method", "args")),
    ("vllm.v1.engine.core", "EngineCoreProc.run_busy_loop", ()),
    ("vllm.v1.engine.core", "EngineCoreProc.is_running", ()),
)
"""For a serving engine that gives memory back."""

QUOTA_READS = (
    "vllm_config",
    "kv_cache_manager",
    "running",
    "max_num_scheduled_tokens",
    "max_num_active_reqs",
    "requires_kv_delivery",
    "prev_step_scheduled_req_ids",
)

PROBE_RELIES_ON: tuple[Reliance, ...] = (
    ("vllm.v1.metrics.loggers", "StatLoggerBase.record", ("scheduler_stats", "iteration_stats", "engine_idx")),
    ("vllm.v1.metrics.loggers", "StatLoggerBase.log_engine_initialized", ()),
    (
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage"),
    ),
    ("vllm.v1.metrics.stats", "PromptTokenStats", ("computed",)),
    ("vllm.v1.metrics.stats", "IterationStats", ()),
)

TRACING_RELIES_ON: tuple[Reliance, ...] = (
    ("vllm.distributed.parallel_state", "_WORLD", ()),
    ("vllm.distributed.parallel_state", "_TP", ()),
    ("vllm.distributed.parallel_state", "_EP", ()),
    ("vllm.distributed.parallel_state", "_PP", ()),
    ("vllm.distributed.parallel_state", "_DP", ()),
    ("vllm.distributed.parallel_state", "_DCP", ()),
    ("vllm.distributed.parallel_state", "_PCP", ()),
    (
        "vllm.config",
        "ParallelConfig",
        ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
    ),
    ("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT.clear", ()),
    ("vllm.model_executor.model_loader.utils", "initialize_model", ("vllm_config",)),
    (
        "vllm.model_executor.model_loader.utils",
        "process_weights_after_loading",
        ("model", "model_config", "target_device"),
    ),
    ("vllm.model_executor.models.registry", "_run_in_subprocess", ("fn",)),
    ("vllm.utils.torch_utils", "set_default_torch_dtype", ("dtype",)),
)

BACKEND_RELIES_ON: tuple[Reliance, ...] = (
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine", ("name",)),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory._registry", ()),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc", ("method", "kwargs")),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method",)),
    ("vllm.v1.engine.core", "EngineCore.set_weight_version", ("weight_version",)),
    ("vllm.v1.engine.core", "EngineCore.get_weight_version", ()),
    ("vllm.v1.engine.core", "EngineCore.preprocess_add_request", ("request",)),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ()),
    ("vllm.v1.engine.core", "EngineCore.pause_scheduler", ("mode", "clear_cache")),
    ("vllm.v1.engine.core", "EngineCore.resume_scheduler", ()),
    ("vllm.v1.engine.core", "EngineCore.is_scheduler_paused", ()),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    ("vllm.config", "get_current_vllm_config_or_none", ()),
    ("vllm.config", "CUDAGraphMode.NONE", ()),
)


def broken(relied_on: Iterable[Reliance] = RELIED_ON) -> list[str]:
    """What is missing, in words; empty if everything is in its place."""
    missing: list[str] = []
    for module, dotted, parameters in relied_on:
        try:
            target: Any = importlib.import_module(module)
            for name in dotted.split("."):
                target = getattr(target, name)
            known = inspect.signature(target).parameters if parameters else {}
        except (ImportError, AttributeError) as error:
            missing.append(f"{module}.{dotted}: {error}")
            continue
        missing += [f"{module}.{dotted} has no parameter {name}" for name in parameters if name not in known]
    return missing


def check_attributes(scheduler: object, names: Iterable[str] = QUOTA_READS) -> None:
    """Raises EngineError if a live scheduler has not what a quota is kept with."""
    _refuse([f"the scheduler has no {name}" for name in names if not hasattr(scheduler, name)])


def check(relied_on: Iterable[Reliance] = RELIED_ON) -> None:
    """Raises EngineError if this vLLM is not one that ROSE knows its way in."""
    _refuse(broken(relied_on))


def _refuse(missing: list[str]) -> None:
    if missing:
        raise EngineError(
            f"this vLLM lacks what ROSE relies on: {'; '.join(missing)}",
            expected="vLLM 0.32",
            to_do="install the locked version",
        )


if __name__ == "__main__":
    check()
    check(TRACING_RELIES_ON)
    check(BACKEND_RELIES_ON)
    check(QUOTA_RELIES_ON)
    check(PROBE_RELIES_ON)
    check(SERVING_KV_RELIES_ON)
