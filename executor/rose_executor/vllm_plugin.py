"""What ROSE adds to a vLLM process, loaded by vLLM itself through the entry point `vllm.general_plugins`.

Invariants
- In a process that is not an engine of ROSE, `register` only offers the weight transfer backend `rose`, for who chooses
  it, and has a serving engine give memory back where its user asks for that.
- Every process of an engine dies with the one that started it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from rose.errors import ConfigError
from rose.processes import die_with_parent, forked_children_die_with_parent
from rose_executor import transfer_plugin, vllm_030, vllm_contract, vllm_reliances
from rose_executor.engine_env import EngineEnv, serving_kv_spare


def register() -> None:
    """Called by vLLM in the API server, the engine core and every worker; once per interpreter."""
    transfer_plugin.register()
    env = EngineEnv.read()
    if env is None:
        _give_serving_memory_back()
        return
    vllm_030.level_engine()
    vllm_contract.check()
    if env.board is not None:
        vllm_contract.check(vllm_reliances.QUOTA)
    elif env.step_log is not None:
        vllm_contract.check(vllm_reliances.RECORDER)
    die_with_parent(os.getppid())
    forked_children_die_with_parent()
    _add_engine_core_methods()
    if env.board is not None:
        _begin_without_pages()
    if env.unpacked_weights:
        _keep_weights_unpacked()


def _give_serving_memory_back() -> None:
    """In a serving engine whose user asks for it.

    Neither a setting that means nothing nor a vLLM that moved its engine core must keep it from starting.
    """
    try:
        spare = serving_kv_spare()
        if spare is not None:
            from rose_executor import kv_serving

            kv_serving.install(spare)
    except (ConfigError, ImportError, AttributeError) as error:
        logging.getLogger("vllm.rose").warning("ROSE gives no memory back, serving goes on: %s", error)


def _add_engine_core_methods() -> None:
    """Any method of the engine core can be called from the API server, and runs between two steps."""
    from vllm.v1.engine.core import EngineCore

    from rose_executor import core_methods

    for name in core_methods.NAMES:
        setattr(EngineCore, name, getattr(core_methods, name))


def _begin_without_pages() -> None:
    """A guest takes no memory for its cache before it has read a quota. On GPU that is kvcached's matter."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from rose_executor import kv_untouched

        kv_untouched.install()


def _keep_weights_unpacked() -> None:
    """On CPU, vLLM packs every Linear (and a tied head) into an opaque copy of its weight.

    An update in place would fail for the Linears and silently miss the head. With plain parameters each
    update is exact, at the price of a slower matrix product: `unpacked_cost_batch_*` of
    `./dev python -m bench transfer --only live`.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    import vllm.model_executor.layers.utils as layers

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep
