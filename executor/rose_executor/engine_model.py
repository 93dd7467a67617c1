"""vLLM's model of one engine rank, built without an engine: on the meta device, or small and real on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rose_executor.engine_rank import EngineRank, emulated
from rose_transfer.layout.layout import Parameter

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder with a model's `config.json`, the tensors of its checkpoint, and the dtype an engine computes in."""

    model_dir: Path
    parameters: Mapping[str, Parameter]
    dtype: torch.dtype


@contextmanager
def as_rank(source: ModelSource, rank: EngineRank) -> Iterator[Any]:
    """Be `rank` for the body; yields the vLLM configuration to build models with."""
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    folder = str(source.model_dir)
    with _classes_inspected_here():
        model_config = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype=source.dtype, enforce_eager=True
        )
    if any(name.endswith(_HEAD) for name in source.parameters):
        # vLLM builds a head of its own where the files hold one, whatever the configuration says of tying.
        for config in (model_config.hf_config, model_config.hf_config.get_text_config()):
            config.tie_word_embeddings = False
    config = VllmConfig(
        model_config=model_config,
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )
    # Set afterwards: at construction vLLM would ask whether this machine has that many devices.
    config.parallel_config.tensor_parallel_size = rank.tp_size
    config.parallel_config.pipeline_parallel_size = rank.pp_size
    config.parallel_config.enable_expert_parallel = rank.expert_parallel
    with emulated(rank), _own_rotary_tables(), set_current_vllm_config(config), set_default_torch_dtype(source.dtype):
        yield config


@contextmanager
def _classes_inspected_here() -> Iterator[None]:
    """vLLM looks at a model class it has not seen before in a new interpreter, which imports everything again.

    That keeps its own process free of CUDA; this one imports the class next in any case.
    """
    from vllm.model_executor.models import registry

    def run_here(fn: Callable[[], Any]) -> Any:
        return fn()

    before = registry._run_in_subprocess
    registry._run_in_subprocess = run_here
    try:
        yield
    finally:
        registry._run_in_subprocess = before


@contextmanager
def _own_rotary_tables() -> Iterator[None]:
    """vLLM shares rotary tables between all models of a process; one without numbers must not reach a live one."""
    from vllm.model_executor.layers import rotary_embedding

    shared = rotary_embedding._ROPE_DICT
    before = dict(shared)
    shared.clear()
    try:
        yield
    finally:
        shared.clear()
        shared.update(before)


def build(config: Any, *, with_memory: bool) -> torch.nn.Module:
    """The model of the rank that this process is, with parameters as before loading. Call it within `as_rank`.

    Without memory, what holds real numbers is on the meta device.
    """
    from vllm.model_executor.model_loader.utils import initialize_model

    # Layers enter themselves by name and refuse to do so twice.
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with nullcontext() if with_memory else _WeightsOnMeta():
        model: torch.nn.Module = initialize_model(vllm_config=config)
    return model


class _WeightsOnMeta(TorchFunctionMode):
    """Makes new tensors of a floating dtype on the meta device.

    Not integers, as `torch.device("meta")` would: the map of experts to ranks is a tensor whose values a
    loader reads.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _MAKERS and options.get("device") is None:
            dtype = options.get("dtype") or (torch.get_default_dtype() if func in _FLOATING_MAKERS else torch.int64)
            if dtype.is_floating_point:
                options["device"] = "meta"
        return func(*args, **options)


_FLOATING_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.linspace}
_MAKERS = _FLOATING_MAKERS | {torch.arange, torch.full}
