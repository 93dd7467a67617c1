"""What vLLM 0.30 lacks of what ROSE uses of 0.32 is added to it here, so that no other module asks which of them runs.

0.30 is supported because kvcached knows how to shrink its KV cache, and not that of a newer one. Three things are
added:

- A limit of running requests apart from the model runner's slots (`Scheduler.max_num_active_reqs`).
- With each answer of the token route, which weights its tokens were computed with (`weight_versions`). 0.30 keeps that
  label in its engine core. Here the scheduler puts the token page's version beside each step's tokens, in a field that
  is meant for connectors, and the API server adds them up, as 0.32 does.
- The events of that route: ids of tokens as numbers, where 0.30 writes `token_id:7`, and a last event also for a
  request that the engine has ended with no more tokens to tell, where 0.30 ends the stream without a word.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import wraps
from typing import Any

from rose_executor import vllm_contract, vllm_reliances

_VERSION, _SPANS = "rose_weight_version", "rose_weight_versions"
_TOKEN = "token_id:"
_DATA = "data: "
_DONE = "data: [DONE]\n\n"


def level_engine() -> None:
    """Add what this process, one of an engine, lacks. Raises EngineError if it cannot: a vLLM older than 0.30."""
    if not _tells_versions():
        vllm_contract.check(vllm_reliances.OLDER)
        _limit_running()
        _note_versions()


def level_server() -> None:
    """The same for the token route of an API server."""
    if not _tells_versions():
        _add_versions_up()
        _write_events()


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

    update_from_output = Scheduler.update_from_output

    @wraps(update_from_output)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        to_clients = update_from_output(self, *args, **kwargs)
        for to_client in to_clients.values():
            for output in to_client.outputs:
                if output.new_token_ids:
                    _put(output, _VERSION, str(self.token_page.version))
        return to_clients

    Scheduler.update_from_output = noting


def _put(output: Any, name: str, value: object) -> None:
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), name: value}


def extend(spans: list[dict[str, Any]], tokens: int, version: str) -> None:
    """Count `tokens` more under a version, as vLLM 0.32 tells spans: contiguous, from 0, without empty ones."""
    end = spans[-1]["end"] if spans else 0
    if not spans or spans[-1]["version"] != version:
        spans.append({"version": version, "start": end, "end": end})
    spans[-1]["end"] += tokens


def _add_versions_up() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    process_outputs = OutputProcessor.process_outputs

    @wraps(process_outputs)
    def adding_up(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is not None:
                spans = vars(state).setdefault(_SPANS, [])
                if output.new_token_ids:
                    extend(spans, len(output.new_token_ids), output.kv_transfer_params[_VERSION])
                _put(output, _SPANS, spans)
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    OutputProcessor.process_outputs = adding_up


def _write_events() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    generator = ServingTokens.serve_tokens_stream_generator

    @wraps(generator)
    async def writing(self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        answer = Answer()

        async def watched() -> AsyncIterator[Any]:
            async for result in result_generator:
                answer.result(result)
                yield result

        async for event in generator(self, request, watched(), *args, **kwargs):
            for text in answer.events(event):
                yield text

    ServingTokens.serve_tokens_stream_generator = writing


class Answer:
    """One answer of the token route: `events` of 0.30 in, as 0.32 would write them out."""

    def __init__(self) -> None:
        self._spans: list[dict[str, Any]] = []
        self._last: Any = None
        self._ended = False

    def result(self, result: Any) -> None:
        """vLLM's `RequestOutput` that the next events are about."""
        self._last = result
        self._spans = (result.kv_transfer_params or {}).get(_SPANS, self._spans)

    def events(self, event: str) -> Iterator[str]:
        if event == _DONE and not self._ended and self._last is not None and self._last.finished:
            yield self._end()
        if '"choices"' not in event:
            self._ended = True
            yield event
            return
        message = json.loads(event.removeprefix(_DATA))
        for choice in message["choices"]:
            self._mend(choice)
        yield _written(message)

    def _mend(self, choice: dict[str, Any]) -> None:
        self._ended = choice["finish_reason"] is not None
        choice["weight_versions"] = self._spans if self._ended else None
        for sampled in (choice["logprobs"] or {}).get("content") or ():
            for entry in (sampled, *sampled["top_logprobs"]):
                entry["token_id"] = int(entry.pop("token").removeprefix(_TOKEN))

    def _end(self) -> str:
        (output,) = self._last.outputs
        choice = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": output.finish_reason}
        return _written({"request_id": self._last.request_id, "choices": [{**choice, "weight_versions": self._spans}]})


def _written(message: dict[str, Any]) -> str:
    return f"{_DATA}{json.dumps(message, separators=(',', ':'))}\n\n"
