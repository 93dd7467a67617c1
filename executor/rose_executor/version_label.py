"""In vLLM's engine core: the label of its weights says what the workers hold, and mixed weights generate nothing.

vLLM takes any label from the caller of `finish_weight_update`, with an update or without, keeps the one before where
none is named, and goes on generating whatever became of the weights. For the backend `rose`:

Invariants
- The label, which vLLM puts on every output, is the number of the version that all workers hold. Until there is one it
  is vLLM's own; afterwards `UNKNOWN`, where they hold none any more. It changes with the weights, between two steps.
- Any other label is refused.
- While weights of a worker are mixed no request is taken, and those that ran are aborted. An update that succeeds ends
  that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose.errors import TransferError
from rose.logs import logger

log = logger("version label")
UNKNOWN = "unknown"
_CHANGES_WEIGHTS = ("finish_weight_update", "reload_weights")
Chosen = Callable[[Any], bool]


def keep_true(is_chosen: Chosen) -> None:
    """Change vLLM's engine core in this process, for engines whose configuration `is_chosen` accepts."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

    collective_rpc, set_weight_version = EngineCore.collective_rpc, EngineCore.set_weight_version
    preprocess_add_request, add_request = EngineCore.preprocess_add_request, LLMEngine.add_request

    def changing(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in _CHANGES_WEIGHTS or not is_chosen(self.vllm_config):
            return collective_rpc(self, method, *args, **kwargs)
        try:
            return collective_rpc(self, method, *args, **kwargs)
        finally:
            if method == "reload_weights":
                collective_rpc(self, _changed_by_others)
            _look(self, collective_rpc(self, _told), set_weight_version)

    def naming(self: Any, weight_version: Any) -> None:
        if is_chosen(self.vllm_config):
            _check(str(weight_version), self.get_weight_version())
        set_weight_version(self, str(weight_version))

    def adding(self: Any, request: Any) -> Any:
        _refuse_if_mixed(self)
        return preprocess_add_request(self, request)

    def adding_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Where the core is in this process, vLLM would go on waiting for what that has refused.
        _refuse_if_mixed(getattr(self.engine_core, "engine_core", None))
        return add_request(self, *args, **kwargs)

    EngineCore.collective_rpc = changing
    EngineCore.set_weight_version = naming
    EngineCore.preprocess_add_request = adding
    LLMEngine.add_request = adding_here


def _changed_by_others(worker: Any) -> None:
    """In a worker."""
    worker.weight_transfer_engine.changed_by_others()


def _told(worker: Any) -> tuple[int | None, str]:
    """In a worker: the version that it holds, and why its weights are mixed, if they are."""
    ours = worker.weight_transfer_engine
    return (None if ours.held is None else ours.held.version), ours.mixed


def _look(core: Any, told: list[tuple[int | None, str]], label: Callable[[Any, str], None]) -> None:
    """Label the weights, and stop or take traffic, by what the workers tell."""
    held = {version for version, _ in told}
    version = held.pop() if len(held) == 1 else None
    if version is not None:
        label(core, str(version))
    elif getattr(core, "_rose_labelled", False):
        label(core, UNKNOWN)
    core._rose_labelled = getattr(core, "_rose_labelled", False) or version is not None
    core._rose_mixed = next((mixed for _, mixed in told if mixed), "")
    if core._rose_mixed:
        log.error("no request is taken until an update succeeds", why=core._rose_mixed)
        was_paused = core.is_scheduler_paused()
        core.pause_scheduler(mode="abort", clear_cache=True)
        if not was_paused:
            core.resume_scheduler()


def _refuse_if_mixed(core: Any) -> None:
    if mixed := getattr(core, "_rose_mixed", ""):
        raise TransferError(f"no request is taken, for the weights are mixed: {mixed}", to_do="update once more")


def _check(label: str, held: str) -> None:
    if label != held:
        raise TransferError(
            f"the weights are not {label!r}: they are labelled {held!r}",
            expected="the number of the version that was brought, or no label: they are labelled by it",
            to_do="update to that version first",
        )
