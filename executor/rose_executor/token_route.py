"""The token path: ids in; ids, log-probs and weight-version spans out, streamed from one engine.

Invariants
- What is returned was sampled by the engine and passed through unchanged: counts of ids and log-probs agree
  and the version spans tile the outputs, or nothing is returned.
- What was received before an engine was lost is kept and handed over, without its version: the engine's own count
  has to vouch for one.
- What ends a turn is what the caller says (`stop_token_ids`, `max_tokens`), not the model folder's defaults.

Speaks vLLM 0.32's `POST /inference/v1/generate`, which `vllm_030` has the older one speak too.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rose.errors import EngineError
from rose.records import Finish, VersionSpan
from rose.waits import WaitBoard
from rose_executor.keep_prefix import Keep

_EVENT_BYTES_MAX = 4 * 2**20
_CONNECT_TIMEOUT_S = 10.0
# The server closes a connection that was idle for 5 s; using one at that moment would look like a lost engine.
_KEEP_ALIVE_S = 2.0
# The server's stand-in for a log-prob that is not finite.
_NO_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class RouteOutput:
    """A whole answer. `top[i]` maps token ids to log-probs at position i, and is empty unless asked for."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    top: tuple[Mapping[int, float], ...]


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """What had arrived when an engine was lost; lengths agree."""

    request_id: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class EngineLost(EngineError):
    """The engine died, fell silent, or left its protocol in mid-answer; `partial` is what had arrived."""

    def __init__(self, what: str, partial: PartialOutput) -> None:
        super().__init__(what, expected="a whole stream", to_do="continue on another or a restarted engine")
        self.partial = partial


class _Malformed(Exception):
    """The stream is not what the protocol promises."""


@dataclass(slots=True)
class _Received:
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Mapping[int, float]] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    finish: Finish | None = None


def open_session() -> aiohttp.ClientSession:
    """A session without aiohttp's own limit of 100 connections: how many turns run at once is decided above."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S))


class TokenRoute:
    """One incarnation of one engine.

    `silence_s` bounds the time without a single byte, `total_s` a whole answer.
    """

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        *,
        engine_id: str = "engine",
        waits: WaitBoard | None = None,
        silence_s: float = 60.0,
        total_s: float = 600.0,
    ) -> None:
        self.engine_id = engine_id
        self._url = f"{base_url}/inference/v1/generate"
        self._session = session
        self._waits = waits if waits is not None else WaitBoard()
        self._total_s = total_s
        self._timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S, sock_read=silence_s)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        top_logprobs: int = 0,
        keep: Keep | None = None,
        on_tokens: Callable[[tuple[int, ...]], None] | None = None,
    ) -> RouteOutput:
        """Sample a continuation of `token_ids`; a stop token that ends it is part of it.

        `request_id` must be new to this incarnation: the token page counts by it. `on_tokens` is given the
        new ids of each chunk. Log-probs are natural and of the distribution that was sampled from. `keep` is what
        becomes of the prefix in the engine's cache.

        Cancelling aborts the request in the engine. There is no seed: vLLM 0.32 on CPU dies of one whose prompt it
        computes in pieces.

        Raises EngineLost if the engine is lost, EngineError if it refuses the request (do not repeat it).
        """
        parameters: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,
            "logprobs": top_logprobs,
            "detokenize": False,
        }
        if keep is not None:
            parameters["extra_args"] = keep.extra_args()
        body = {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": parameters, "stream": True}
        received = _Received()
        try:
            with self._waits.waiting("answer", self.engine_id, self._total_s):
                async for event in self._events(body):
                    arrived = _take(event, received, top_logprobs)
                    if on_tokens is not None and arrived:
                        on_tokens(arrived)
            return _complete(received)
        except (_Malformed, aiohttp.ClientError, OSError, TimeoutError, UnicodeError) as error:
            # The last is of names that no resolver takes, such as `a..b`.
            why = str(error) if isinstance(error, _Malformed) else f"{type(error).__name__}: {error}"
            raise EngineLost(
                f"{self.engine_id} was lost after {len(received.output_ids)} tokens of {request_id}: {why}",
                PartialOutput(request_id, tuple(received.output_ids), tuple(received.logprobs)),
            ) from error

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
            if response.status != 200:
                raise await self._refused(response, body["request_id"])
            buffer = b""
            async for data in response.content.iter_any():
                *events, buffer = (buffer + data).split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        return
                    message = _decode(event)
                    if "error" in message:
                        raise self._failed_in_stream(message["error"], body["request_id"])
                    yield message
                if len(buffer) > _EVENT_BYTES_MAX:
                    raise _Malformed(f"an event of more than {_EVENT_BYTES_MAX} bytes")

    async def _refused(self, response: aiohttp.ClientResponse, request_id: str) -> Exception:
        text = await response.text(errors="replace")
        try:
            text = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = text[:500]
        return self._failure(request_id, response.status, text)

    def _failed_in_stream(self, error: Any, request_id: str) -> Exception:
        # A prompt that is too long is only found out after the stream has begun with status 200.
        if isinstance(error, dict) and isinstance(error.get("code"), int):
            return self._failure(request_id, error["code"], str(error.get("message"))[:500])
        return _Malformed(f"an error in mid-stream: {str(error)[:500]}")

    def _failure(self, request_id: str, status: int, text: str) -> Exception:
        if not 400 <= status < 500:
            return _Malformed(f"status {status}: {text}")
        return EngineError(
            f"{self.engine_id} refused {request_id} with status {status}: {text}",
            to_do="shorten the prompt or mend the request; repeating it would not help",
        )


def _decode(event: bytes) -> dict[str, Any]:
    if not event.startswith(b"data: "):
        raise _Malformed(f"an event that begins with {event[:20]!r}")
    try:
        message = json.loads(event[6:])
    except ValueError as error:
        raise _Malformed(f"an event that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise _Malformed(f"an event that is not an object: {event[:40]!r}")
    return message


def _take(message: Mapping[str, Any], received: _Received, top_logprobs: int) -> tuple[int, ...]:
    """Add one event to what was received, all of it or nothing; return its new ids."""
    try:
        (choice,) = message["choices"]
        ids = [int(token) for token in choice["token_ids"] or ()]
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        if [entry["token_id"] for entry in content] != ids:
            raise _Malformed(f"{len(ids)} ids with log-probs of other ids")
        if not all(math.isfinite(value) and _NO_LOGPROB < value <= 1e-3 for value in logprobs):
            raise _Malformed(f"log-probs {logprobs}")
        top: list[Mapping[int, float]] = []
        if top_logprobs:
            top = [{int(t["token_id"]): float(t["logprob"]) for t in entry["top_logprobs"]} for entry in content]
        finish = None if choice["finish_reason"] is None else Finish(choice["finish_reason"])
        if received.finish is not None:
            raise _Malformed("an event after the last one")
        versions = tuple(
            VersionSpan(int(span["version"]), int(span["start"]), int(span["end"]))
            for span in choice["weight_versions"] or ()
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _Malformed(f"an event of another shape: {type(error).__name__}: {error}") from error
    received.output_ids += ids
    received.logprobs += logprobs
    received.top += top if top_logprobs else [{} for _ in ids]
    received.finish = finish
    received.versions = versions
    return tuple(ids)


def _complete(received: _Received) -> RouteOutput:
    if received.finish is None:
        raise _Malformed("the stream ended before the answer did")
    at = 0
    for span in received.versions:
        if span.start != at or span.end <= span.start:
            raise _Malformed(f"version spans {received.versions} do not tile the output")
        at = span.end
    if at != len(received.output_ids):
        raise _Malformed(f"version spans {received.versions} for {len(received.output_ids)} tokens")
    return RouteOutput(
        tuple(received.output_ids),
        tuple(received.logprobs),
        received.versions,
        received.finish,
        tuple(received.top),
    )
