"""An address may answer anything; that is a problem in words, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import ClientSession, web

from rose.observer.exposition import Sample, Samples
from rose.observer.measures import FRESH_S
from rose.observer.scraper import BYTES_MAX, EVERY_MAX_S, EVERY_S, Scraper, every_s
from rose.waits import WaitBoard

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


async def look(url: str, timeout_s: float = 30.0) -> tuple[str, list[Samples]]:
    """The problem and what was scraped, after one look."""
    seen: list[Samples] = []
    waits = WaitBoard()
    async with ClientSession() as http:
        scraper = Scraper(url, "engine-0", http, waits, scraped=seen.append, timeout_s=timeout_s)
        await scraper.look()
    assert waits.snapshot() == ()
    return scraper.problem, seen


async def look_at(handler: Handler, timeout_s: float = 30.0) -> tuple[str, list[Samples]]:
    async with serving(handler) as url:
        return await look(url, timeout_s)


def test_who_answers_slowly_is_asked_less_often_but_within_what_is_fresh() -> None:
    assert every_s(0.01) == EVERY_S
    assert EVERY_S < every_s(0.06) < EVERY_MAX_S < FRESH_S
    assert every_s(2.0) == EVERY_MAX_S


async def well(request: web.Request) -> web.StreamResponse:
    return web.Response(text="rose_steps_total 3.0\n")


def test_a_good_answer_is_read() -> None:
    problem, seen = asyncio.run(look_at(well))
    assert problem == ""
    assert seen == [{"rose_steps_total": (Sample({}, 3.0),)}]


def test_the_format_is_asked_for_that_keeps_an_engines_names() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers["Accept"])
        return await well(request)

    asyncio.run(look_at(handler))
    assert asked == ["text/plain;version=0.0.4"]


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def trickle(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"# a line\n")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("handler", [hang, trickle])
def test_one_that_does_not_end_is_given_up(handler: Handler) -> None:
    problem, seen = asyncio.run(look_at(handler, timeout_s=0.3))
    assert problem == "no answer within 0.3 s"
    assert seen == []


async def flood(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 50 * BYTES_MAX:
            await answer.write(b"x" * (1 << 20))
            sent += 1 << 20
    assert sent < 3 * BYTES_MAX + (8 << 20)
    return answer


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b'rose_steps_total{\xff="\x00 \xfe\n' * 50)


async def away(request: web.Request) -> web.StreamResponse:
    if request.path == "/elsewhere":
        return await well(request)
    raise web.HTTPFound("/elsewhere")


async def failed(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="rose_steps_total 3.0\n")


async def torn(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b"rose_steps_total 3.0\n")
    assert request.transport is not None
    request.transport.abort()
    return answer


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (flood, "more than 4 MiB"),
        (garbage, "text format"),
        (away, "status 302"),
        (failed, "status 500"),
        (torn, ""),
    ],
)
def test_nonsense_is_a_problem_in_words(handler: Handler, words: str) -> None:
    problem, seen = asyncio.run(look_at(handler))
    assert problem
    assert words in problem
    assert seen == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/metrics", "file:///etc/passwd", "https://127.0.0.1/", "", "http://[::1", "http://a b/"]
)
def test_an_address_that_is_none_is_a_problem_in_words(url: str) -> None:
    problem, seen = asyncio.run(look(url))
    assert problem
    assert seen == []
