"""What ROSE relies on inside vLLM and vLLM does not promise: checked at every start, by name.

An engine on a vLLM that moved one of these must not start: it would count wrongly or update wrongly, and
say nothing. Written for vLLM 0.32.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from rose.errors import EngineError

# (module, dotted name, parameters that must exist)
RELIED_ON: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler._update_request_with_output", ("request", "new_token_ids")),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_request_with_output", ("request", "new_token_ids")),
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
)


def broken(relied_on: Iterable[tuple[str, str, tuple[str, ...]]] = RELIED_ON) -> list[str]:
    """What is missing, in words; empty if everything is in its place."""
    missing: list[str] = []
    for module, dotted, parameters in relied_on:
        try:
            target: Any = importlib.import_module(module)
            for name in dotted.split("."):
                target = getattr(target, name)
            known = inspect.signature(target).parameters
        except (ImportError, AttributeError) as error:
            missing.append(f"{module}.{dotted}: {error}")
            continue
        missing += [f"{module}.{dotted} has no parameter {name}" for name in parameters if name not in known]
    return missing


def check() -> None:
    """Raises EngineError if this vLLM is not one that ROSE knows its way in."""
    missing = broken()
    if missing:
        raise EngineError(
            f"this vLLM lacks what ROSE relies on: {'; '.join(missing)}",
            expected="vLLM 0.32",
            to_do="install the locked version",
        )


if __name__ == "__main__":
    check()
