"""The token route against a server that keeps, bends or breaks the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rose.errors import EngineError
from rose.records import Finish, VersionSpan
from rose.waits import WaitBoard
from rose_executor.token_route import EngineLost, RouteOutput, TokenRoute, open_session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(
    ids: list[int],
    *,
    finish: str | None = None,
    versions: list[tuple[int, int, int]] | None = None,
    top: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {
            "content": [
                {
                    "token_id": token,
                    "logprob": -token / 10,
                    "top_logprobs": [{"token_id": token + k, "logprob": -(token + k) / 10} for k in range(top)],
                }
                for token in ids
            ]
        },
        "finish_reason": finish,
        "weight_versions": None
        if versions is None
        else [{"version": str(v), "start": start, "end": end} for v, start, end in versions],
    }
    return {"request_id": "r", "choices": [{**choice, **changes}]}


def streaming(*events: dict[str, Any] | bytes, done: bool = True, hang: bool = False, cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for one in events:
            data = one if isinstance(one, bytes) else b"data: " + json.dumps(one).encode()
            # In two pieces: an event may be cut anywhere by the network.
            await response.write(data[:7])
            await response.write(data[7:] + b"\n\n")
        while hang and request.transport is not None:
            await asyncio.sleep(0.01)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        elif done:
            await response.write(b"data: [DONE]\n\n")
        return response

    return handle


def failing(status: int, body: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    return handle


async def serve(handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post("/inference/v1/generate", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def ask(handler: Handler, *, options: dict[str, Any] | None = None, **request: Any) -> RouteOutput:
    async def run() -> RouteOutput:
        runner, url = await serve(handler)
        try:
            async with open_session() as session:
                route = TokenRoute(url, session, engine_id="engine-0", **(options or {}))
                parameters = {"max_tokens": 8, "temperature": 1.0, "stop_token_ids": [2], **request}
                return await route.generate("r", [5, 6], **parameters)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def lost(handler: Handler, **options: Any) -> EngineLost:
    with pytest.raises(EngineLost) as caught:
        ask(handler, options=options)
    return caught.value


def test_a_whole_answer() -> None:
    seen: list[tuple[int, ...]] = []
    output = ask(
        streaming(event([3, 4], top=2), event([2], finish="stop", versions=[(7, 0, 1), (8, 1, 3)], top=2)),
        top_logprobs=2,
        on_tokens=seen.append,
    )
    assert output == RouteOutput(
        output_ids=(3, 4, 2),
        logprobs=(-0.3, -0.4, -0.2),
        versions=(VersionSpan(7, 0, 1), VersionSpan(8, 1, 3)),
        finish=Finish.STOP,
        top=({3: -0.3, 4: -0.4}, {4: -0.4, 5: -0.5}, {2: -0.2, 3: -0.3}),
    )
    assert seen == [(3, 4), (2,)]


def test_an_answer_aborted_before_its_first_token_is_empty() -> None:
    output = ask(streaming(event([], finish="abort", logprobs=None, versions=[])))
    assert output == RouteOutput((), (), (), Finish.ABORT, ())


def test_the_request_is_what_was_asked_for() -> None:
    bodies: list[dict[str, Any]] = []
    answer = streaming(event([3], finish="length", versions=[(0, 0, 1)]))

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await answer(request)

    ask(handle, top_logprobs=5)
    assert bodies == [
        {
            "request_id": "r",
            "token_ids": [5, 6],
            "stream": True,
            "sampling_params": {
                "max_tokens": 8,
                "temperature": 1.0,
                "stop_token_ids": [2],
                "ignore_eos": True,
                "logprobs": 5,
                "detokenize": False,
            },
        }
    ]


WHOLE = event([4], finish="stop", versions=[(0, 0, 2)])
BROKEN_STREAMS: dict[str, tuple[Handler, str]] = {
    "ends before the answer": (streaming(event([3]), done=False), "ended before the answer"),
    "ends before the answer, politely": (streaming(event([3])), "ended before the answer"),
    "connection cut": (streaming(event([3]), cut=True), "lost after 1 tokens"),
    "not an event": (streaming(event([3]), b"hello"), "begins with b'hello'"),
    "not JSON": (streaming(event([3]), b"data: {"), "not JSON"),
    "not an object": (streaming(event([3]), b"data: 3"), "not an object"),
    "no choices": (streaming(event([3]), {"choices": []}), "another shape"),
    "two choices": (streaming(event([3]), {"choices": WHOLE["choices"] * 2}), "another shape"),
    "ids without log-probs": (streaming(event([3]), event([4], logprobs=None)), "log-probs of other ids"),
    "log-probs of other ids": (
        streaming(event([3]), event([4], logprobs={"content": [{"token_id": 5, "logprob": -1.0}]})),
        "log-probs of other ids",
    ),
    "a log-prob that stands for NaN": (
        streaming(event([3]), event([4], logprobs={"content": [{"token_id": 4, "logprob": -9999.0}]})),
        "log-probs",
    ),
    "a log-prob above zero": (
        streaming(event([3]), event([4], logprobs={"content": [{"token_id": 4, "logprob": 0.5}]})),
        "log-probs",
    ),
    "an unknown finish": (streaming(event([3]), event([4], finish="bored")), "another shape"),
    "no versions": (streaming(event([3]), event([4], finish="stop")), "for 2 tokens"),
    "versions with a gap": (
        streaming(event([3]), event([4], finish="stop", versions=[(0, 0, 1), (1, 2, 2)])),
        "do not tile",
    ),
    "versions of a longer answer": (
        streaming(event([3]), event([4], finish="stop", versions=[(0, 0, 3)])),
        "for 2 tokens",
    ),
    "a version without a number": (
        streaming(event([3]), event([4], finish="stop", weight_versions=[{"version": "new", "start": 0, "end": 2}])),
        "another shape",
    ),
    "an event after the last": (streaming(event([3]), WHOLE, event([5])), "after the last"),
    "an error in the stream": (streaming(event([3]), {"error": {"message": "dead", "code": 500}}), "500: dead"),
    "an error without a code": (streaming(event([3]), {"error": "dead"}), "an error in mid-stream: dead"),
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_a_broken_stream_hands_over_what_had_arrived(name: str) -> None:
    handler, why = BROKEN_STREAMS[name]
    error = lost(handler)
    assert why in str(error)
    assert error.partial.request_id == "r"
    assert error.partial.output_ids[0] == 3
    assert len(error.partial.logprobs) == len(error.partial.output_ids)


def test_a_silent_stream_is_lost_and_named_meanwhile() -> None:
    waits = WaitBoard()
    shown: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        shown.extend(f"{wait.what} of {wait.whom}" for wait in waits.snapshot())
        return await streaming(event([3]), hang=True)(request)

    error = lost(handle, silence_s=0.1, waits=waits)
    assert error.partial.output_ids == (3,)
    assert shown == ["answer of engine-0"]
    assert waits.snapshot() == ()


def test_an_endless_event_is_given_up() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(20):
            await response.write(b"x" * 2**20)
        return response

    assert "an event of more than" in str(lost(handle))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:99999", "http://a..b:80", "nowhere"])
def test_nobody_there(url: str) -> None:
    async def run() -> None:
        async with open_session() as session:
            route = TokenRoute(url, session)
            await route.generate("r", [5], max_tokens=1, temperature=1.0, stop_token_ids=())

    with pytest.raises(EngineLost) as caught:
        asyncio.run(run())
    assert caught.value.partial.output_ids == ()


def test_a_server_error_is_a_lost_engine() -> None:
    assert "status 503: no" in str(lost(failing(503, "no")))


@pytest.mark.parametrize(
    "handler",
    [
        failing(400, json.dumps({"error": {"message": "too long", "code": 400}})),
        streaming({"error": {"message": "too long", "code": 400}}),
    ],
)
def test_a_refused_request_is_not_a_lost_engine(handler: Handler) -> None:
    with pytest.raises(EngineError, match="refused r with status 400: too long") as caught:
        ask(handler)
    assert not isinstance(caught.value, EngineLost)
    assert "repeating it would not help" in str(caught.value)
