"""Scraping a serving engine: what stands on the board while its page answers, and that no page does any harm."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from rose.waits import WaitBoard
from rose_executor import serving_observer
from rose_executor.board import SERVING, BoardReader, HalfWriter, claim_quota
from rose_executor.board_states import Reading, ServingState
from rose_executor.serving_observer import ServingObserver

LONG_S = 30.0
PAGE = """vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:inter_token_latency_seconds_count 100.0
vllm:inter_token_latency_seconds_sum 2.0
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scene:
    """An observer before a board and a page that does what the test wants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waits = WaitBoard()
        self.asked = 0
        self.running = 2
        self.odd: Handler | None = None
        self.observer: ServingObserver

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.odd is not None:
            return await self.odd(request)
        return web.Response(text=PAGE.format(running=self.running))

    def read(self) -> Reading[ServingState]:
        reader = BoardReader(self.path)
        try:
            return reader.read(SERVING, time.monotonic())
        finally:
            reader.close()

    async def until(self, what: Callable[[Reading[ServingState]], bool]) -> Reading[ServingState]:
        async with asyncio.timeout(LONG_S):
            while not what(reading := self.read()):
                await asyncio.sleep(0.005)
        return reading

    async def seen(self, running: int) -> ServingState:
        reading = await self.until(lambda one: one.state is not None and one.state.running == running)
        assert reading.state is not None
        return reading.state

    async def unseen(self) -> None:
        await self.until(lambda one: one.state is None)

    async def in_trouble(self, words: str) -> None:
        async with asyncio.timeout(LONG_S):
            while words not in self.observer.trouble:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def scene(folder: Path, board: bool = True) -> AsyncIterator[Scene]:
    made = Scene(folder / "board")
    if board:
        claim_quota(made.path).close()
    app = web.Application()
    app.router.add_get("/metrics", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made.observer = ServingObserver(f"http://127.0.0.1:{port}/metrics", made.path, made.waits)
    running = asyncio.create_task(made.observer.run())
    try:
        yield made
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await runner.cleanup()


def test_a_page_is_on_the_board_and_stays_there_between_two_looks(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(tmp_path) as here:
            state = await here.seen(2)
            assert (state.decoding, state.next_step_s, state.arrivals) == (2, 0.02, 0)
            assert state.looked_at_s <= time.monotonic()
            assert here.observer.trouble == ""
            number = here.read().number
            await here.until(lambda one: one.number >= number + 3 and one.state is not None)
            here.running = 0
            idle = await here.seen(0)
            assert idle.idle
            assert idle.looked_at_s > state.looked_at_s

    asyncio.run(check())


def test_a_beat_claims_nothing_that_was_not_looked_at(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(tmp_path) as here:
            first = await here.seen(2)
            seen = {first}
            while here.asked < 4:
                reading = here.read()
                if reading.state is not None:  # a machine may be too busy for that
                    seen.add(reading.state)
                await asyncio.sleep(0.005)
            assert len({one.looked_at_s for one in seen}) == len(seen) <= 4

    asyncio.run(check())


def test_a_process_that_stood_still_renews_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ages_s: list[float] = []
    write = HalfWriter.write

    def noting(writer: HalfWriter[ServingState], state: ServingState) -> None:
        ages_s.append(time.monotonic() - state.looked_at_s)
        write(writer, state)

    monkeypatch.setattr(HalfWriter, "write", noting)

    async def check() -> None:
        async with scene(tmp_path) as here:
            await here.seen(2)
            asked = here.asked
            while here.asked == asked:  # it stands still in the middle of a look,
                await asyncio.sleep(0)
            time.sleep(2.0)
            await here.seen(2)
            time.sleep(2.0)  # and between two
            await here.unseen()
            await here.seen(2)
            assert max(ages_s) < 2.0

    asyncio.run(check())


async def huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        for _ in range(64):
            await response.write(b"vllm:num_requests_running 1\n" * 4096)
    return response


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        for letter in PAGE * 100:
            await response.write(letter.encode())
            await asyncio.sleep(0.05)
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(LONG_S)
    raise AssertionError("nobody waits so long")


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"vllm:num_requests_running 1\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound(str(request.url))


async def failing(request: web.Request) -> web.StreamResponse:
    raise web.HTTPServiceUnavailable


async def html(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html><body>Welcome</body></html>", content_type="text/html")


async def binary(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(range(256)) * 1000)


async def packed(request: web.Request) -> web.StreamResponse:
    """What would be 64 MiB."""
    return web.Response(body=gzip.compress(bytes(64 << 20), 1), headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (huge, "longer than"),
        (drip, "/metrics did not answer whole within 0.5 s; look there with curl"),
        (silent, "/metrics did not answer whole within 0.5 s; look there with curl"),
        (cut, ""),
        (redirect, "answers 302"),
        (failing, "answers 503"),
        (html, "does not say how many requests vLLM runs"),
        (binary, "does not say how many requests vLLM runs"),
        (packed, "does not say how many requests vLLM runs"),
    ],
)
def test_no_page_does_harm_and_what_it_does_not_say_is_unknown(tmp_path: Path, odd: Handler, words: str) -> None:
    async def check() -> None:
        async with scene(tmp_path) as here:
            await here.seen(2)
            here.odd = odd
            await here.unseen()
            await here.in_trouble(words)
            assert here.observer.trouble
            here.odd, here.running = None, 3
            await here.seen(3)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("server", "words"), [("127.0.0.1:1", "127.0.0.1:1"), ("a..b", "idna"), (f"{70 * 'a'}", "idna")]
)
def test_a_server_that_is_not_there_is_unknown_until_it_is(tmp_path: Path, server: str, words: str) -> None:
    async def check() -> None:
        claim_quota(tmp_path / "board").close()
        observer = ServingObserver(f"http://{server}/metrics", tmp_path / "board", WaitBoard())
        running = asyncio.create_task(observer.run())
        async with asyncio.timeout(LONG_S):
            while words not in observer.trouble:
                assert not running.done()
                await asyncio.sleep(0.005)
        assert not running.done()
        running.cancel()

    asyncio.run(check())


def test_each_look_is_a_wait_with_a_name(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(tmp_path) as here:
            here.odd = silent
            async with asyncio.timeout(LONG_S):
                while not (waits := here.waits.snapshot()):
                    await asyncio.sleep(0.005)
            (wait,) = waits
            assert wait.what == "metrics"
            assert wait.whom.startswith("serving engine http://127.0.0.1:")
            assert wait.deadline_s - wait.since_s == SERVING.stale_after_s

    asyncio.run(check())


def test_an_engine_with_a_probe_is_not_asked(tmp_path: Path) -> None:
    async def check() -> None:
        path = tmp_path / "board"
        claim_quota(path).close()
        probe = HalfWriter(path, SERVING)
        async with scene(tmp_path, board=False) as here:
            await here.in_trouble("has a live writer")
            await asyncio.sleep(2.5 * serving_observer.EVERY_S)
            assert here.asked == 0
            probe.close()
            await here.seen(2)

    asyncio.run(check())


def test_after_a_look_that_failed_the_half_is_free_for_a_probe(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(tmp_path) as here:
            await here.seen(2)
            here.odd = failing
            await here.in_trouble("503")
            probe = HalfWriter(here.path, SERVING)
            here.odd = None
            await here.in_trouble("has a live writer")
            probe.close()

    asyncio.run(check())


def test_a_board_that_comes_late_or_is_made_anew_is_found(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(tmp_path, board=False) as here:
            await here.in_trouble("cannot open the board")
            assert here.asked == 0
            claim_quota(here.path).close()
            await here.seen(2)
            here.path.unlink()
            claim_quota(here.path).close()
            await here.seen(2)

    asyncio.run(check())


def test_a_full_file_system_is_trouble_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = False
    write = HalfWriter.write

    def refusing(writer: HalfWriter[ServingState], state: ServingState) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(writer, state)

    monkeypatch.setattr(HalfWriter, "write", refusing)

    async def check() -> None:
        nonlocal full
        async with scene(tmp_path) as here:
            await here.seen(2)
            full = True
            await here.in_trouble("No space left")
            await here.unseen()
            full, here.running = False, 3
            await here.seen(3)

    asyncio.run(check())
