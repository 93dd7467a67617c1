"""Counts of a lent engine: the pages of all its lives, told to whoever has the token, by a service and its client."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from functools import wraps
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificate_tools import make_authority, renew
from stream_tools import late_front

from rose import certificates
from rose.certificates import Certificates, read_certificates
from rose.errors import ClusterError, ContractError, DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose_executor import counts_service, page_shelf
from rose_executor.counts_client import CountsClient
from rose_executor.counts_service import Questions, serve_counts
from rose_executor.page_reader import PageReader
from rose_executor.page_shelf import PageShelf
from rose_executor.page_writer import PageWriter
from rose_executor.token_page import RequestCount
from rose_transfer.store.files import DRAFT_PREFIX

TOKEN = "0123456789abcdef" * 2
LONG_S = 60.0
LIFE, OTHER = "a1" * 8, "b2" * 8
WRITER = """
import sys, time
from pathlib import Path
from rose_executor.page_writer import PageWriter

path, incarnation = Path(sys.argv[1]), sys.argv[2]
page = PageWriter(path, incarnation=incarnation, slots=4, version=3)
page.add("r", 7)
print("written", flush=True)
time.sleep(600)
"""


def page_of(folder: Path, incarnation: str = LIFE) -> Path:
    return folder / f"guest.{incarnation}.page"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts processes that write a page with 7 tokens of request `r`, and live on."""
    started = []

    def start(incarnation: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(page_of(tmp_path, incarnation)), incarnation],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def in_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @wraps(test)
    def run(**given: object) -> None:
        asyncio.run(test(**given))

    return run


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(LONG_S)


@asynccontextmanager
async def told(
    folder: Path,
    alive: Callable[[str], bool] = lambda incarnation: True,
    token: str = TOKEN,
    there: Certificates | None = None,
    here: Certificates | None = None,
) -> AsyncIterator[tuple[CountsClient, PageShelf]]:
    """A service over a shelf, and a client of it."""
    with closing(PageShelf(folder, WaitBoard())) as shelf:
        server, address = await serve_counts(shelf, alive, port=0, token=TOKEN, certificates=there)
        client = CountsClient(address, token=token, waits=WaitBoard(), timeout_s=LONG_S, certificates=here)
        try:
            yield client, shelf
        finally:
            await client.close()
            await server.stop(None)


@in_loop
async def test_a_living_engine_is_counted_as_it_goes(tmp_path: Path) -> None:
    async with told(tmp_path) as (client, _):
        page = PageWriter(page_of(tmp_path), incarnation=LIFE, slots=4, version=5)
        page.add("a", 3)
        page.add("b", 4)
        page.finish("none")
        page.version = 6
        page.add("a", 1)
        page.finish("b")
        counts = await client.counts(LIFE, ["b", "nobody", "a", "none"])
        assert (counts.known, counts.alive, counts.total_tokens) == (True, True, 8)
        assert counts.requests == {
            "b": RequestCount(4, 5, 5, finished=True),
            "a": RequestCount(4, 5, 6, finished=False),
            "none": RequestCount(0, None, None, finished=True),
        }
        page.add("a", 10)
        later = await client.counts(LIFE)
        assert (later.total_tokens, later.requests) == (18, {})


@in_loop
async def test_version_nought_is_a_version(tmp_path: Path) -> None:
    async with told(tmp_path) as (client, _):
        page = PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1, version=0)
        page.add("a", 1)
        assert (await client.counts(LIFE, ["a"])).requests["a"] == RequestCount(1, 0, 0, finished=False)


@pytest.mark.parametrize("asked", [OTHER, "", "../lock", "*", f"guest.{LIFE}"])
@in_loop
async def test_an_incarnation_without_a_page_is_unknown(tmp_path: Path, asked: str) -> None:
    async with told(tmp_path) as (client, _):
        PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1).add("a", 1)
        counts = await client.counts(asked, ["a"])
        assert (counts.known, counts.alive, counts.total_tokens, counts.requests) == (False, False, 0, {})


@in_loop
async def test_whether_it_lives_is_asked_before_its_page_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    read = PageReader.requests
    monkeypatch.setattr(PageReader, "requests", lambda *args: order.append("page") or read(*args))
    async with told(tmp_path, lambda incarnation: bool(order.append(incarnation))) as (client, _):
        PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1).add("a", 1)
        assert not (await client.counts(LIFE)).alive
    assert order == [LIFE, "page"]


@in_loop
async def test_a_question_for_more_than_can_be_looked_up_at_once_is_refused(tmp_path: Path) -> None:
    async with told(tmp_path) as (client, _):
        PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1).add("a", 1)
        ids = ["a", *map(str, range(counts_service.REQUESTS_MAX - 1))]
        assert list((await client.counts(LIFE, ids)).requests) == ["a"]
        with pytest.raises(EngineError, match=f"at most {counts_service.REQUESTS_MAX} are answered"):
            await client.counts(LIFE, [*ids, "one more"])


@in_loop
async def test_the_dead_are_counted_by_the_next_owner_of_the_folder(
    tmp_path: Path, engine: Callable[[str], subprocess.Popen[str]]
) -> None:
    kill(engine(LIFE))
    kill(engine(OTHER))
    async with told(tmp_path, lambda incarnation: False) as (client, shelf):
        assert shelf.total() == 14
        counts = await client.counts(OTHER, ["r"])
    assert (counts.known, counts.alive, counts.total_tokens) == (True, False, 7)
    assert counts.requests == {"r": RequestCount(7, 3, 3, finished=False)}


@in_loop
async def test_what_was_set_apart_counts_for_nobody_also_under_the_next_owner(
    tmp_path: Path, engine: Callable[[str], subprocess.Popen[str]]
) -> None:
    async with told(tmp_path) as (client, shelf):
        process = engine(LIFE)
        shelf.set_apart(LIFE)
        assert (await client.counts(LIFE)).total_tokens == 0
        assert shelf.total([LIFE]) == 0
        page = PageWriter(page_of(tmp_path, OTHER), incarnation=OTHER, slots=4)
        page.add("known", 8)
        shelf.set_apart(OTHER)
        page.add("a", 3)
        assert (await client.counts(OTHER)).total_tokens == 3
        assert shelf.total([LIFE, OTHER]) == 3
        page.add("woken", 1)
        shelf.set_more_apart(OTHER, 1)
        assert (await client.counts(OTHER)).total_tokens == 3
        with pytest.raises(EngineError, match="has no token page"):
            shelf.set_apart("c3" * 8)
    kill(process)
    page_of(tmp_path, OTHER).unlink()
    async with told(tmp_path, lambda incarnation: False) as (client, shelf):
        assert (await client.counts(LIFE)).total_tokens == 0
        assert shelf.total() == 0


@in_loop
async def test_where_nothing_can_be_set_apart_that_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with told(tmp_path) as (client, shelf):
        PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1).add("a", 3)
        monkeypatch.setattr(page_shelf, "write_whole", full)
        with pytest.raises(ClusterError, match="No space left on device"):
            shelf.set_apart(LIFE)
        assert (await client.counts(LIFE)).total_tokens == 3


@in_loop
async def test_nobody_is_heard_without_the_token(tmp_path: Path) -> None:
    async with told(tmp_path, token="another-token-entirely") as (client, _):
        with pytest.raises(EngineError, match="unauthenticated: the token is missing or wrong"):
            await client.counts(LIFE)


@in_loop
async def test_certificates_are_shown_both_ways_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    own = read_certificates(str(make_authority(tmp_path / "authority").signs("own")))
    async with told(tmp_path, there=own, here=own) as (client, _):
        PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1).add("a", 3)
        assert (await client.counts(LIFE)).total_tokens == 3
    async with told(tmp_path / "2", there=own) as (client, _):
        with pytest.raises(EngineError, match=r"no counts: it asks for certificates \(TLS\)"):
            await client.counts(LIFE)
    async with told(tmp_path / "3", here=own) as (client, _):
        with pytest.raises(EngineError, match="no counts: it speaks no TLS"):
            await client.counts(LIFE)
    async with told(tmp_path / "4", there=own, here=own, token="another-token-entirely") as (client, _):
        with pytest.raises(EngineError, match="the token is missing or wrong"):
            await client.counts(LIFE)


@in_loop
async def test_certificates_that_are_renewed_are_shown_on_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    folder = make_authority(tmp_path / "old").signs("own")
    own = read_certificates(str(folder))
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        server, address = await serve_counts(shelf, lambda _: True, port=0, token=TOKEN, certificates=own)
        client = CountsClient(address, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S, certificates=own)
        assert not (await client.counts(LIFE)).known
        await server.stop(None)
        renew(folder, make_authority(tmp_path / "new").signs("own"))
        with pytest.raises(EngineError, match="unavailable"):  # away: it connects anew
            await client.counts(LIFE)
        server, _ = await serve_counts(shelf, lambda _: True, port=int(address[10:]), token=TOKEN, certificates=own)
        assert not (await client.counts(LIFE)).known
        await client.close()
        await server.stop(None)


@in_loop
async def test_an_executor_that_is_away_is_an_error_at_once(tmp_path: Path) -> None:
    client = CountsClient("127.0.0.1:9", token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S)
    with pytest.raises(EngineError, match=r"executor 127\.0\.0\.1:9: no counts: unavailable"):
        await client.counts(LIFE)
    await client.close()
    with pytest.raises(ContractError, match="closed"):
        await client.counts(LIFE)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "sched..example:7080", "nowhere"])
def test_an_address_that_nobody_can_dial_is_an_error_of_the_executor(address: str) -> None:
    async def check() -> None:
        client = CountsClient(address, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S)
        with pytest.raises(EngineError, match="no counts"):
            await client.counts(LIFE)
        await client.close()

    asyncio.run(check())


@in_loop
async def test_an_executor_that_is_slow_to_take_a_connection_is_waited_for(tmp_path: Path) -> None:
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        server, address = await serve_counts(shelf, lambda incarnation: True, port=0, token=TOKEN)
        async with late_front(address, late_s=0.5) as late:
            client = CountsClient(late, token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S)
            assert not (await client.counts(LIFE)).known
            await client.close()
        await server.stop(None)


@in_loop
async def test_a_wait_for_counts_has_a_name_and_an_end() -> None:
    async def hang(request: object, context: object) -> None:
        await asyncio.sleep(LONG_S)

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(hang)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("rose.v1.Executor", {"Counts": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    waits = WaitBoard()
    late = CountsClient(f"127.0.0.1:{port}", token=TOKEN, waits=waits, timeout_s=0.3)
    asking = asyncio.create_task(late.counts(LIFE))
    await asyncio.sleep(0.05)
    assert [(wait.what, wait.whom) for wait in waits.snapshot()] == [("counts", f"executor 127.0.0.1:{port}")]
    with pytest.raises(DeadlineExceeded, match="no counts after"):
        await asking
    assert waits.snapshot() == ()
    closed = CountsClient(f"127.0.0.1:{port}", token=TOKEN, waits=waits, timeout_s=LONG_S)
    asking = asyncio.create_task(closed.counts(LIFE))
    await asyncio.sleep(0.05)
    await closed.close()
    with pytest.raises(EngineError, match="the client was closed"):
        await asking
    await late.close()
    await server.stop(None)


@in_loop
async def test_a_question_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with told(tmp_path) as (client, _):
        with pytest.raises(EngineError, match="resource_exhausted"):
            await client.counts(LIFE, ["x" * 1000] * 1100)
        assert not (await client.counts(LIFE)).known


@in_loop
async def test_two_services_do_not_share_a_port(tmp_path: Path) -> None:
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        server, address = await serve_counts(shelf, bool, port=0, token=TOKEN)
        with pytest.raises(ClusterError, match="for the counts"):
            await serve_counts(shelf, bool, port=int(address.rpartition(":")[2]), token=TOKEN)
        await server.stop(None)


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    first = PageShelf(tmp_path, WaitBoard())
    with pytest.raises(ClusterError, match="used by another executor"):
        PageShelf(tmp_path, WaitBoard())
    first.close()
    PageShelf(tmp_path, WaitBoard()).close()


def test_a_folder_is_taken_over_only_when_its_engine_is_gone(
    tmp_path: Path, engine: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = engine(LIFE)
    monkeypatch.setattr(page_shelf, "_WRITERS_END_S", 0.2)
    with pytest.raises(ClusterError, match=f"process {process.pid} still writes"):
        PageShelf(tmp_path, WaitBoard())
    kill(process)
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        assert shelf.total() == 7


@pytest.mark.parametrize("written_s", [0.0, 4e9])
def test_neither_date_nor_process_number_says_whether_an_engine_lives(
    tmp_path: Path, written_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_shelf, "_WRITERS_END_S", 0.0)
    page = PageWriter(page_of(tmp_path), incarnation=LIFE, slots=1)
    os.utime(page_of(tmp_path), (written_s, written_s))  # as after a jump of the machine's date
    with pytest.raises(ClusterError, match="still writes"):
        PageShelf(tmp_path, WaitBoard())
    page.close()  # as the kernel does for a process that is gone; this one lives on, with the number on the page
    PageShelf(tmp_path, WaitBoard()).close()


def test_what_a_killed_owner_left_half_made_goes_and_pages_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_shelf, "PAGES_MAX", 2)
    lives = ["c1" * 8, "c2" * 8, "c3" * 8]
    for age, life in enumerate(lives):
        page = PageWriter(page_of(tmp_path, life), incarnation=life, slots=1)
        page.add("a", 1)
        page.close()
        os.utime(page_of(tmp_path, life), (1000.0 - age, 1000.0 - age))
    (tmp_path / f".guest.{LIFE}.page.123").write_bytes(b"")
    (tmp_path / f"{DRAFT_PREFIX}123").write_bytes(b"7")
    (tmp_path / f"guest.{OTHER}.page").write_bytes(b"nonsense")
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        assert [shelf.page(life) is not None for life in lives] == [True, False, False]
        assert shelf.page(OTHER) is None
        assert shelf.total() == 1
    assert not list(tmp_path.glob(".*"))


@in_loop
async def test_a_page_that_is_spoilt_counts_as_it_did_last_and_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with told(tmp_path) as (client, shelf):
        for life in (LIFE, OTHER):
            page = PageWriter(page_of(tmp_path, life), incarnation=life, slots=64)
            page.add("a", 3)
            page.close()
            assert (await client.counts(life)).total_tokens == 3
        assert shelf.total([LIFE]) == 6
        os.truncate(page_of(tmp_path, LIFE), 0)
        for living in ([LIFE], [LIFE], [], []):
            assert shelf.total(living) == 6
            assert not (await client.counts(LIFE, ["a"])).known
        assert (await client.counts(OTHER)).total_tokens == 3
        with pytest.raises(EngineError, match="it was cut short"):
            shelf.set_apart(LIFE)
    assert len([line for line in caplog.messages if "of no use" in line]) == 1


def test_few_pages_are_open_at_once_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_shelf, "OPEN_MAX", 2)
    lives = [f"{life:02d}" * 8 for life in range(6)]
    for life in lives:
        page = PageWriter(page_of(tmp_path, life), incarnation=life, slots=1)
        page.add("a", 1)
        page.close()
    before = len(os.listdir("/proc/self/fd"))
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        for _ in range(2):
            assert shelf.total(lives) == 6
            for life in lives:
                page_read = shelf.page(life)
                assert page_read is not None
                assert (page_read.incarnation, page_read.total()) == (life, 1)
            assert len(os.listdir("/proc/self/fd")) == before + 3  # its lock, too
        page_of(tmp_path, lives[0]).unlink()
        assert shelf.page(lives[0]) is None
        assert shelf.total() == 6
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot be used"):
        PageShelf(tmp_path / "file" / "state", WaitBoard())


@in_loop
async def test_a_service_goes_on_for_as_long_as_it_is_asked_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_service, "QUIET_S", 0.2)
    monkeypatch.setattr(counts_service, "LAST_WORDS_S", LONG_S)
    questions = Questions(lambda incarnation: incarnation == LIFE)
    await asyncio.wait_for(questions.over(WaitBoard()), 0.1)
    assert (questions.alive(LIFE), questions.alive(OTHER)) == (True, False)
    waits = WaitBoard()
    over = asyncio.create_task(questions.over(waits))
    asked_s = time.monotonic()
    while time.monotonic() < asked_s + 0.5:
        before_s = time.monotonic()
        questions.alive(LIFE)
        await asyncio.sleep(0.01)
        if time.monotonic() - before_s < 0.2:
            assert not over.done()
            assert [wait.what for wait in waits.snapshot()] == ["last questions"]
    last_s = time.monotonic()
    await over
    assert time.monotonic() - last_s > 0.1
    monkeypatch.setattr(counts_service, "LAST_WORDS_S", 0.1)
    questions.alive(LIFE)
    monkeypatch.setattr(counts_service, "QUIET_S", LONG_S)
    await asyncio.wait_for(questions.over(waits), LONG_S / 2)


def test_what_somebody_else_has_put_beside_the_pages_keeps_no_executor_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "guest.a1.page").symlink_to(tmp_path / "gone")
    (tmp_path / "guest.b2.page").write_bytes(b"x" * 4097)
    os.mkfifo(tmp_path / "guest.c3.page")
    (tmp_path / ".guest.d4.page.draft").mkdir()
    with closing(PageShelf(tmp_path, WaitBoard())) as shelf:
        assert shelf.total() == 0
    assert (tmp_path / ".guest.d4.page.draft").is_dir()


def test_an_executor_that_answers_nonsense_is_named() -> None:
    async def nonsense(request: bytes, context: Any) -> bytes:
        return b"\xff"

    class Anything(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(nonsense)

    async def check() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Anything(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = CountsClient(f"127.0.0.1:{port}", token=TOKEN, waits=WaitBoard(), timeout_s=LONG_S)
        with pytest.raises(EngineError, match="answers nonsense"):
            await client.counts("a1" * 8)
        await client.close()
        await server.stop(None)

    asyncio.run(check())
