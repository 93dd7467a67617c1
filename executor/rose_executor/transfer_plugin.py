"""What a vLLM process needs for the weight transfer backend `rose` to be chosen; see `transfer_backend`.

A process whose engine has chosen another backend, or none, notices nothing.
"""

from __future__ import annotations

from typing import Any

BACKEND = "rose"


def register() -> None:
    """Offer the backend in this process. Call it before a model is loaded; again does no harm."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "rose_executor.transfer_backend", "RoseWeightTransferEngine")
    _keep_weights_unpacked()


def _keep_weights_unpacked() -> None:
    """On CPU, where vLLM packs weights into copies that no update reaches, have it keep plain ones for this backend."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    import vllm.model_executor.layers.utils as layers
    from vllm.config import get_current_vllm_config_or_none

    dispatch = layers.dispatch_cpu_unquantized_gemm

    def dispatch_unless_updated(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        chosen = None if config is None else config.weight_transfer_config
        if chosen is not None and chosen.backend == BACKEND:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            dispatch(layer, remove_weight)

    layers.dispatch_cpu_unquantized_gemm = dispatch_unless_updated
