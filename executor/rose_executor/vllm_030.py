"""What vLLM 0.30 lacks of what ROSE uses of 0.32 is added to it here, so that no other module knows of two versions.

0.30 is supported because kvcached knows how to shrink its KV cache, and not that of a newer one. Three things are
added:

- A limit of running requests apart from the model runner's slots (`Scheduler.max_num_active_reqs`).
- With each answer of the token route, which weights its tokens were computed with (`weight_versions`). 0.30 keeps that
  label in its engine core. Here the scheduler notes what the token page says at each token, and hands it over with the
  last one, in a field that is meant for connectors.
- Ids of tokens as numbers in the log-probs of that route, where 0.30 writes `token_id:7`.

What stays different: a stream whose request vLLM itself aborts ends without a last event, and so counts as lost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import wraps
from typing import Any

from rose_executor import vllm_contract, vllm_reliances

_SPANS = "rose_weight_versions"
_TOKEN = "token_id:"
_DATA = "data: "


def level_engine() -> None:
    """Add what this process, one of an engine, lacks. Raises EngineError if it cannot: a vLLM older than 0.30."""
    if not _tells_versions():
        vllm_contract.check(vllm_reliances.OLDER)
        _limit_running()
        _note_versions()


def level_server() -> None:
    """The same for the token route of an API server."""
    if not _tells_versions():
        _tell_versions()


def _tells_versions() -> bool:
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


def _limit_running() -> None:
    """`max_num_active_reqs` limits who may be admitted; who runs already, and cannot be set back, breaks nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def limit(self: Any) -> int:
        value: int = vars(self)["_rose_active_reqs"]
        return value

    def set_limit(self: Any, value: int) -> None:
        vars(self)["_rose_active_reqs"] = value

    # vLLM admits while fewer run than this, and asserts after each step that no more do.
    Scheduler.max_num_running_reqs = property(lambda self: max(limit(self), len(self.running)), set_limit)
    Scheduler.max_num_active_reqs = property(limit, set_limit)


def _note_versions() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    update, free = Scheduler._update_request_with_output, Scheduler._free_request

    @wraps(update)
    def noting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        kept, stopped = update(self, request, *args, **kwargs)
        if kept:
            spans = vars(self).setdefault("_rose_spans", {}).setdefault(request.request_id, [])
            extend(spans, len(kept), str(self.token_page.version))
        return kept, stopped

    @wraps(free)
    def handing_over(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        for_kv, for_encoder = free(self, request, *args, **kwargs)
        spans = vars(self).get("_rose_spans", {}).pop(request.request_id, [])
        return {**(for_kv or {}), _SPANS: spans}, for_encoder

    Scheduler._update_request_with_output = noting
    Scheduler._free_request = handing_over


def extend(spans: list[dict[str, Any]], tokens: int, version: str) -> None:
    """Count `tokens` more under a version, as vLLM 0.32 tells spans: contiguous, from 0, without empty ones."""
    end = spans[-1]["end"] if spans else 0
    if not spans or spans[-1]["version"] != version:
        spans.append({"version": version, "start": end, "end": end})
    spans[-1]["end"] += tokens


def _tell_versions() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    generator = ServingTokens.serve_tokens_stream_generator

    @wraps(generator)
    async def telling(self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        spans: list[dict[str, Any]] = []

        async def watched() -> AsyncIterator[Any]:
            async for result in result_generator:
                spans[:] = (result.kv_transfer_params or {}).get(_SPANS, spans)
                yield result

        async for event in generator(self, request, watched(), *args, **kwargs):
            yield as_032(event, spans)

    ServingTokens.serve_tokens_stream_generator = telling


def as_032(event: str, spans: list[dict[str, Any]]) -> str:
    """An event of 0.30's token route as 0.32 would write it; the last one of an answer tells its spans."""
    if '"choices"' not in event:
        return event
    message = json.loads(event.removeprefix(_DATA))
    for choice in message["choices"]:
        choice["weight_versions"] = spans if choice["finish_reason"] is not None else None
        for sampled in (choice["logprobs"] or {}).get("content") or ():
            for entry in (sampled, *sampled["top_logprobs"]):
                entry["token_id"] = int(entry.pop("token").removeprefix(_TOKEN))
    return f"{_DATA}{json.dumps(message, separators=(',', ':'))}\n\n"
