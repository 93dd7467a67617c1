"""The names inside vLLM that ROSE uses and vLLM does not promise, each by the part of ROSE that needs it.

`ENGINE` is for every engine, `SERVER` for its API server, `QUOTA` for a guest, `RECORDER` for an engine that writes
down its steps and is no guest, `PROBE` for a serving engine that is probed, `SERVING_KV` for one that gives memory
back, `TRACING` for the trace of a layout, `BACKEND` for the weight transfer backend. All of that holds on every vLLM in
`SUPPORTED`, once `vllm_030` has added what the older one lacks; `OLDER` is what that itself relies on there.

Whoever uses one more such name adds it here: `tests/executor/test_vllm_contract.py` has a test for each, on each vLLM.
"""

from __future__ import annotations

SUPPORTED = ("0.32", "0.30")

Reliance = tuple[str, str, tuple[str, ...]]
"""(module, dotted name, parameters that must exist)"""


def _in(module: str, *names: str) -> tuple[Reliance, ...]:
    """Reliances on one module, each written as "Class.name" or as "Class.method(parameter, parameter)"."""
    parts = (name.rstrip(")").partition("(") for name in names)
    return tuple((module, name, tuple(parameters.replace(",", " ").split())) for name, _, parameters in parts)


_SCHEDULER = "vllm.v1.core.sched.scheduler"

_WORKER: tuple[Reliance, ...] = (
    *_in("vllm.platforms", "current_platform.is_cpu"),
    *_in(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm(layer, remove_weight)",
        "cpu_unquantized_gemm.cpu_linear",
    ),
    *_in(
        "vllm.config",
        "CUDAGraphMode.NONE",
        "CompilationConfig.cudagraph_mode",
        "ModelConfig.dtype",
        "ModelConfig.model",
        "ParallelConfig.enable_expert_parallel",
        "VllmConfig.compilation_config",
    ),
    *_in(
        "vllm.distributed.parallel_state",
        "get_tp_group",
        "get_pp_group",
        "GroupCoordinator.world_size",
        "GroupCoordinator.rank_in_group",
    ),
)
"""Of a worker whose weights are updated: its place in the engine, and what it computes with."""

_STEPS: tuple[Reliance, ...] = (
    *_in(
        _SCHEDULER,
        "Scheduler.schedule",
        "Scheduler.update_from_output(scheduler_output)",
        "Scheduler.requests",
        "Scheduler.vllm_config",
    ),
    *_in(
        "vllm.v1.core.sched.output",
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.total_num_scheduled_tokens",
    ),
    *_in("vllm.v1.request", "Request.num_computed_tokens"),
    *_in("vllm.platforms", "current_platform.is_cpu"),
    *_in("vllm.config", "VllmConfig.parallel_config", "ParallelConfig.distributed_executor_backend"),
)
"""Of a scheduler whose steps are metered: what each had to do, and by which clock it is measured."""

_PAGES: tuple[Reliance, ...] = (
    *_in(
        _SCHEDULER,
        "Scheduler.schedule",
        "Scheduler.update_from_output(scheduler_output)",
        "Scheduler.kv_cache_manager",
        "Scheduler.has_requests",
        "Scheduler.pause_state",
    ),
    *_in("vllm.v1.core.sched.output", "SchedulerOutput.total_num_scheduled_tokens"),
    *_in("vllm.v1.core.sched.interface", "PauseState.UNPAUSED"),
    *_in("vllm.v1.core.kv_cache_manager", "KVCacheManager.block_pool"),
    *_in(
        "vllm.v1.core.block_pool",
        "BlockPool.num_gpu_blocks",
        "BlockPool.get_num_free_blocks",
        "BlockPool.get_new_blocks(num_blocks)",
        "BlockPool.free_blocks(ordered_blocks)",
    ),
    *_in("vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_id"),
    *_in("vllm.v1.engine.core", "EngineCore.collective_rpc(method, args)", "EngineCoreProc.is_running"),
    *_in("vllm.v1.worker.gpu_worker", "Worker.model_runner"),
    *_in("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.kv_caches"),
)
"""Of an engine whose free blocks give their pages back."""

ENGINE: tuple[Reliance, ...] = (
    *_in(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "Scheduler._update_request_with_output(request, new_token_ids)",
        "Scheduler._free_request(request)",
        "Scheduler.reset_prefix_cache(reset_running_requests)",
        "Scheduler.max_num_running_reqs",
        "Scheduler.kv_cache_manager",
        "Scheduler.connector",
        "Scheduler.running",
    ),
    *_in(
        "vllm.v1.core.sched.async_scheduler",
        "AsyncScheduler._update_request_with_output(request, new_token_ids)",
    ),
    *_in("vllm.v1.core.kv_cache_manager", "KVCacheManager.block_pool"),
    *_in(
        "vllm.v1.core.block_pool",
        "BlockHashToBlockMap",
        "BlockPool.blocks",
        "BlockPool.cached_block_hash_to_block",
        "BlockPool.cached_block_hashes_by_block",
        "BlockPool.free_block_queue",
    ),
    *_in("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_blocks(request_id)", "KVCacheBlocks.blocks"),
    *_in(
        "vllm.v1.core.kv_cache_utils",
        "KVCacheBlock.reset_hash",
        "KVCacheBlock.block_hash",
        "KVCacheBlock.block_id",
        "KVCacheBlock.is_null",
        "FreeKVCacheBlockQueue.num_free_blocks",
        "FreeKVCacheBlockQueue.popleft_n(n)",
        "FreeKVCacheBlockQueue.remove(block)",
        "FreeKVCacheBlockQueue.append_n(blocks)",
        "FreeKVCacheBlockQueue.prepend_n(blocks)",
        "FreeKVCacheBlockQueue.get_all_free_blocks",
    ),
    *_in(
        "vllm.v1.request",
        "Request.request_id",
        "Request.arrival_time",
        "Request.num_preemptions",
        "Request.cache_salt",
        "Request.block_hashes",
        "Request.update_block_hashes",
        "Request.get_finished_reason",
        "Request.sampling_params",
        "Request.status",
        "RequestStatus.FINISHED_STOPPED",
        "RequestStatus.FINISHED_LENGTH_CAPPED",
    ),
    *_in("vllm.sampling_params", "SamplingParams.extra_args"),
    *_in(
        "vllm.v1.engine.core",
        "EngineCore.scheduler",
        "EngineCore.collective_rpc(method, args)",
        "EngineCore.reset_prefix_cache(reset_running_requests)",
        "EngineCore.set_weight_version(weight_version)",
        "EngineCore.resume_scheduler",
        "EngineCore.is_scheduler_paused",
        "EngineCoreProc.pause_scheduler(mode, clear_cache)",
    ),
    *_in(
        "vllm.v1.worker.worker_base",
        "WorkerBase.get_model",
        "WorkerBase.vllm_config",
        "WorkerBase.model_config",
        "WorkerBase.parallel_config",
    ),
    *_in("vllm.model_executor.models.registry", "_run_in_subprocess(fn)"),
    *_in("vllm.utils.system_utils", "get_mp_context"),
    *_WORKER,
)

SERVER: tuple[Reliance, ...] = (
    *_in("vllm.entrypoints.launchers.api_server.entry", "main"),
    *_in("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.name", "EndpointPlugin.required_tasks"),
    *_in("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.attach_router(app)"),
    *_in("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.init_state(engine_client, state, args)"),
    *_in("vllm.v1.engine.async_llm", "AsyncLLM.engine_core", "AsyncLLM.errored"),
    *_in("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async(method)"),
)

QUOTA: tuple[Reliance, ...] = (
    *_STEPS,
    *_PAGES,
    *_in(
        _SCHEDULER,
        "Scheduler.get_request_counts",
        "Scheduler.finish_requests(request_ids, finished_status)",
        "Scheduler.reset_prefix_cache(reset_running_requests)",
        "Scheduler._preempt_request(request, timestamp, drop_stale_output)",
        "Scheduler._request_blocks_can_be_freed(request)",
        "Scheduler.running",
        "Scheduler.max_num_scheduled_tokens",
        "Scheduler.max_num_active_reqs",
        "Scheduler.requires_kv_delivery",
        "Scheduler.prev_step_scheduled_req_ids",
    ),
    *_in(
        "vllm.v1.engine",
        "EngineCoreOutput(request_id, new_token_ids, finish_reason)",
        "EngineCoreOutputs.outputs",
        "FinishReason.ABORT",
    ),
    *_in("vllm.v1.core.block_pool", "BlockPool.get_usage"),
    *_in("vllm.v1.core.kv_cache_utils", "KVCacheBlock.ref_cnt"),
    *_in("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.initialize_kv_cache(kv_cache_config)"),
    *_in(
        "vllm.v1.request",
        "Request.request_id",
        "Request.priority",
        "Request.arrival_time",
        "Request.client_index",
        "RequestStatus.FINISHED_ABORTED",
    ),
)

RECORDER = _STEPS

SERVING_KV: tuple[Reliance, ...] = (
    *_PAGES,
    *_in("vllm.v1.engine.core", "EngineCore.vllm_config", "EngineCore.scheduler", "EngineCoreProc.run_busy_loop"),
    *_in("vllm.config", "VllmConfig.parallel_config", "ParallelConfig.data_parallel_size"),
)

PROBE: tuple[Reliance, ...] = (
    *_in(
        "vllm.v1.metrics.loggers",
        "StatLoggerBase(vllm_config, engine_index)",
        "StatLoggerBase.record(scheduler_stats, iteration_stats, engine_idx)",
        "StatLoggerBase.log_engine_initialized",
    ),
    *_in(
        "vllm.v1.metrics.stats",
        "SchedulerStats.num_running_reqs",
        "SchedulerStats.num_waiting_reqs",
        "SchedulerStats.num_skipped_waiting_reqs",
        "SchedulerStats.kv_cache_usage",
        "IterationStats.num_generation_tokens",
        "IterationStats.prompt_token_stats",
        "IterationStats.time_to_first_tokens_iter",
        "IterationStats.finished_requests",
        "PromptTokenStats.computed",
    ),
    *_in("vllm.config", "VllmConfig.cache_config", "CacheConfig.num_gpu_blocks", "CacheConfig.block_size"),
)

TRACING: tuple[Reliance, ...] = (
    *_in("vllm.distributed.parallel_state", "_WORLD", "_TP", "_EP", "_PP", "_DP", "_DCP", "_PCP"),
    *_in(
        "vllm.config",
        "ModelConfig(model, tokenizer, skip_tokenizer_init, dtype, enforce_eager)",
        "ModelConfig.hf_config",
        "LoadConfig(load_format)",
        "DeviceConfig(device)",
        "VllmConfig(model_config, load_config, device_config)",
        "ParallelConfig(tensor_parallel_size, pipeline_parallel_size, enable_expert_parallel)",
        "VllmConfig.compilation_config",
        "VllmConfig.parallel_config",
        "CompilationConfig.static_forward_context",
        "CompilationConfig.static_all_moe_layers",
        "set_current_vllm_config(vllm_config)",
    ),
    *_in("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT.clear"),
    *_in(
        "vllm.model_executor.model_loader.utils",
        "initialize_model(vllm_config)",
        "process_weights_after_loading(model, model_config, target_device)",
    ),
    *_in("vllm.model_executor.models.registry", "_run_in_subprocess(fn)"),
    *_in("vllm.utils.torch_utils", "set_default_torch_dtype(dtype)"),
)

BACKEND: tuple[Reliance, ...] = (
    *_WORKER,
    *_in(
        "vllm.distributed.weight_transfer.factory",
        "WeightTransferEngineFactory.register_engine(name)",
        "WeightTransferEngineFactory._registry",
    ),
    *_in(
        "vllm.distributed.weight_transfer.base",
        "WeightTransferInitInfo",
        "WeightTransferUpdateInfo",
        "WeightTransferEngine(config, vllm_config, device, model)",
        "WeightTransferEngine.init_info_cls",
        "WeightTransferEngine.update_info_cls",
        "WeightTransferEngine.supports_draft_weight_update",
        "WeightTransferEngine.model_config",
        "WeightTransferEngine.parallel_config",
        "WeightTransferEngine.init_transfer_engine(init_info)",
        "WeightTransferEngine.start_weight_update",
        "WeightTransferEngine.update_weights(update_info)",
        "WeightTransferEngine.parse_update_info",
        "WeightTransferEngine.receive_weights(update_info)",
        "WeightTransferEngine.finish_weight_update",
        "WeightTransferEngine.shutdown",
    ),
    *_in(
        "vllm.v1.worker.gpu_worker",
        "Worker.weight_transfer_engine",
        "Worker.update_weights(update_info)",
        "Worker.finish_weight_update",
        "Worker.reload_weights",
    ),
    *_in(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.collective_rpc(method, timeout, args, kwargs)",
        "MultiprocExecutor.response_mqs",
        "MultiprocExecutor.vllm_config",
    ),
    *_in("vllm.distributed.device_communicators.shm_broadcast", "MessageQueue.dequeue(timeout)"),
    *_in(
        "vllm.v1.engine.core",
        "EngineCore.vllm_config",
        "EngineCore.collective_rpc(method)",
        "EngineCore.set_weight_version(weight_version)",
        "EngineCore.get_weight_version",
        "EngineCore.preprocess_add_request(request)",
        "EngineCore.pause_scheduler(mode, clear_cache)",
        "EngineCore.resume_scheduler",
        "EngineCore.is_scheduler_paused",
    ),
    *_in("vllm.v1.engine.core_client", "InprocClient.engine_core"),
    *_in("vllm.v1.engine.llm_engine", "LLMEngine.add_request", "LLMEngine.engine_core"),
    *_in(
        "vllm.config",
        "get_current_vllm_config_or_none",
        "ParallelConfig.data_parallel_index",
        "ParallelConfig.world_size",
        "VllmConfig.parallel_config",
        "VllmConfig.weight_transfer_config",
        "WeightTransferConfig.backend",
    ),
    *_in("vllm.distributed.parallel_state", "GroupCoordinator.cpu_group"),
)

OLDER: tuple[Reliance, ...] = (
    *_in(
        _SCHEDULER,
        "Scheduler.max_num_running_reqs",
        "Scheduler.running",
        "Scheduler.update_from_output",
    ),
    *_in(
        "vllm.v1.engine",
        "EngineCoreOutput.kv_transfer_params",
        "EngineCoreOutput.new_token_ids",
        "EngineCoreOutput.request_id",
        "EngineCoreOutputs.outputs",
    ),
    *_in(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.process_outputs(engine_core_outputs)",
        "OutputProcessor.request_states",
        "RequestState",
    ),
    *_in(
        "vllm.outputs",
        "CompletionOutput.finish_reason",
        "RequestOutput.kv_transfer_params",
        "RequestOutput.outputs",
        "RequestOutput.finished",
        "RequestOutput.request_id",
    ),
    *_in(
        "vllm.entrypoints.scale_out.token_in_token_out.serving",
        "ServingTokens.serve_tokens_stream_generator(request, result_generator)",
    ),
)
