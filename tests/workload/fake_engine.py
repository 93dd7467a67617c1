"""A stand-in for a serving engine on loopback: streams completions as vLLM does, or in one of many wrong ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Writes = Callable[[web.StreamResponse, "Asked"], Awaitable[None]]


@dataclass(slots=True)
class Asked:
    """One request as it came in."""

    body: dict[str, Any]
    request_id: str

    @property
    def tokens(self) -> int:
        return int(self.body["max_tokens"])


@dataclass(slots=True)
class FakeEngine:
    """`answer` writes each stream; `asked` are the requests so far, `gone` how many clients hung up."""

    answer: Writes
    status: int = 200
    context: int | None = 512
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    open: int = 0
    gone: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(await request.json(), request.headers["X-Request-Id"])
        self.asked.append(asked)
        if self.status != 200:
            return web.Response(status=self.status, text="out of order", headers={"Location": "/v1/completions"})
        response = web.StreamResponse()
        await response.prepare(request)
        self.open += 1
        try:
            await self.answer(response, asked)
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise
        finally:
            self.open -= 1
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "max_model_len": self.context}]})


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_get("/v1/models", engine.models)
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def event(tokens: int, *, finish: str | None = None, choices: bool = True) -> bytes:
    """As vLLM writes it, with `tokens` so far."""
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    message = {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [choice] if choices else [],
        "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens},
    }
    return b"data: " + json.dumps(message).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def streaming(
    *, first_s: float = 0.0, gap_s: float = 0.0, at_once: int = 1, short_by: int = 0, done: bool = True
) -> Writes:
    """A whole answer: after `first_s`, `at_once` tokens an event, `gap_s` between events."""

    async def write(response: web.StreamResponse, asked: Asked) -> None:
        await asyncio.sleep(first_s)
        end = asked.tokens - short_by
        for tokens in range(at_once, end + at_once, at_once):
            last = tokens >= end
            # In two pieces: the network may cut an event anywhere.
            data = event(min(tokens, end), finish="length" if last else None)
            await response.write(data[:9])
            await response.write(data[9:])
            await asyncio.sleep(gap_s)
        await response.write(event(end, choices=False))
        if done:
            await response.write(DONE)

    return write


def writing(*pieces: bytes) -> Writes:
    async def write(response: web.StreamResponse, _: Asked) -> None:
        for piece in pieces:
            await response.write(piece)

    return write


async def hang(response: web.StreamResponse, _: Asked) -> None:
    """Never answer."""
    await asyncio.sleep(3600)


def dying(after: Sequence[bytes]) -> Writes:
    """Write this much, then be gone."""

    async def write(response: web.StreamResponse, _: Asked) -> None:
        for piece in after:
            await response.write(piece)
        await asyncio.sleep(0.05)
        assert response._req is not None
        assert response._req.transport is not None
        response._req.transport.abort()

    return write


def stuck(after: Sequence[bytes]) -> Writes:
    """Write this much, then nothing more."""

    async def write(response: web.StreamResponse, asked: Asked) -> None:
        for piece in after:
            await response.write(piece)
        await hang(response, asked)

    return write
