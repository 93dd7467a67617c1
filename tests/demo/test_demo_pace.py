"""The pace of the serving load: never above the plan's, slower where the engine is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rose.demo.load import LoadPlan
from rose.demo.pace import request_seconds
from rose.demo.plan import PART, SHARE, TOKEN_IDS, TRACE, paced, planned_load
from rose.errors import EngineError


@given(request_s=st.floats(1e-3, 60.0), share=st.floats(0.05, 1.0))
def test_requests_one_after_the_other_take_no_more_than_the_share(request_s: float, share: float) -> None:
    rate_rps = paced(PART, request_s, share).rate_rps
    assert rate_rps is not None
    assert PART.rate_rps is not None
    assert rate_rps <= PART.rate_rps
    assert rate_rps * request_s <= share + 1e-3 * request_s
    assert rate_rps == PART.rate_rps or rate_rps * request_s >= share - 1e-3 * request_s


def test_a_slow_machine_gets_the_same_requests_further_apart() -> None:
    usual = planned_load(LoadPlan(TRACE, PART, TOKEN_IDS))
    slow = planned_load(LoadPlan(TRACE, paced(PART, 0.4, SHARE), TOKEN_IDS))
    assert 20 < len(slow.requests) < len(usual.requests)
    pairs = zip(slow.requests, usual.requests, strict=False)
    assert all(one.prompt_tokens == other.prompt_tokens for one, other in pairs)
    assert slow.length_s == usual.length_s


@asynccontextmanager
async def _engine(status: int = 200) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    asked: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def test_it_asks_for_what_the_load_asks_for_and_never_twice_for_one_prompt() -> None:
    async def main() -> None:
        load = planned_load(LoadPlan(TRACE, PART, TOKEN_IDS))
        async with _engine() as (url, asked):
            assert await request_seconds(url, load) > 0
        prompts = [one["prompt"] for one in asked]
        assert len({str(prompt) for prompt in prompts}) == len(prompts) > 2
        mean = sum(one.prompt_tokens for one in load.requests) / len(load.requests)
        assert all(isinstance(prompt, list) and abs(len(prompt) - mean) <= 0.5 for prompt in prompts)

    asyncio.run(main())


def test_an_engine_that_refuses_is_named() -> None:
    async def main() -> None:
        async with _engine(500) as (url, _):
            with pytest.raises(EngineError, match="status 500"):
                await request_seconds(url, planned_load(LoadPlan(TRACE, PART, TOKEN_IDS)))

    asyncio.run(main())
