"""What a vLLM process needs for the weight transfer backend `rose` to be chosen; see `transfer_backend`.

A process whose engine has chosen another backend, or none, notices nothing; nor does a vLLM that knows no backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rose.logs import logger
from rose_executor import version_label, vllm_contract, vllm_reliances

log = logger("transfer plugin")
BACKEND = "rose"
_ANSWER_TIMEOUT_S = 600.0
"""A worker that dies ends the engine before that; one that answers later has the next question answered wrongly."""


def register() -> None:
    """Offer the backend in this process. Call it before a model is loaded; again does no harm.

    A vLLM that moved what this relies on is left as it is: it may be a user's own, which must not suffer from ours.
    """
    if missing := vllm_contract.broken(vllm_reliances.BACKEND):
        log.info("the weight transfer backend is not offered", why="; ".join(missing))
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "rose_executor.transfer_backend", "RoseWeightTransferEngine")
    _keep_weights_unpacked()
    _ask_every_worker()
    version_label.keep_true(_is_chosen)


class _ReadToTheEnd(list[Any]):
    """Queues of answers, one for each worker: whoever stops reading them at an error has had the rest read for him."""

    def __iter__(self) -> Iterator[Any]:
        unread = list(super().__iter__())
        try:
            while unread:
                yield unread.pop(0)
        finally:
            for queue in unread:
                with suppress(TimeoutError):
                    queue.dequeue(timeout=_ANSWER_TIMEOUT_S)


def _ask_every_worker() -> None:
    """Where one of several workers fails, the others are neither left waiting for it, nor left unread.

    vLLM does not read the answers of the others then, and takes them for those to its next question. And a worker
    for which a list of update information is too short fails before the backend, which others wait in, hears of it.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    collective_rpc = MultiprocExecutor.collective_rpc

    def asking_all(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, *others: Any, **named: Any
    ) -> Any:
        if _is_chosen(self.vllm_config):
            if not isinstance(self.response_mqs, _ReadToTheEnd):
                self.response_mqs = _ReadToTheEnd(self.response_mqs)
            if method == "update_weights" and kwargs:
                kwargs = {**kwargs, "update_info": _for_all(kwargs["update_info"], self.vllm_config.parallel_config)}
        return collective_rpc(self, method, timeout, args, kwargs, *others, **named)

    MultiprocExecutor.collective_rpc = asking_all


def _for_all(update_info: Any, parallel_config: Any) -> Any:
    """The list that says something to each worker: nothing, which the backend refuses, to those beyond its end."""
    if not isinstance(update_info, list):
        return update_info
    workers = (parallel_config.data_parallel_index + 1) * parallel_config.world_size
    return update_info + [{}] * (workers - len(update_info))


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
        if _is_chosen(get_current_vllm_config_or_none()):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            dispatch(layer, remove_weight)

    layers.dispatch_cpu_unquantized_gemm = dispatch_unless_updated


def _is_chosen(vllm_config: Any) -> bool:
    chosen = None if vllm_config is None else vllm_config.weight_transfer_config
    return chosen is not None and chosen.backend == BACKEND
