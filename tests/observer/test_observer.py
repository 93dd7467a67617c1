"""Real status pages, real /metrics servers, and an observer that looks at them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.metrics import ExecutorMetrics, serve
from rose.observer.measures import SeriesKey, Source
from rose.observer.observer import View, observe
from rose.observer.series import SeriesStore
from rose.observer.services import (
    REMEMBERED_MAX,
    REMEMBERED_S,
    TARGETS_MAX,
    Life,
    Service,
    read_services,
    targets,
    updated,
)
from rose.runs import Run, open_service, runtime_root
from rose.status import Page, StatusBoard
from rose.waits import WaitBoard

pytestmark = pytest.mark.usefixtures("runtime_dir")


def service(stack: contextlib.ExitStack, tmp_path: Path, name: str, **facts: str) -> tuple[Run, StatusBoard]:
    waits = WaitBoard()
    run = stack.enter_context(open_service(name, tmp_path / "runs", waits, {}))
    board = stack.enter_context(StatusBoard(run, waits))
    for key, value in facts.items():
        board.fact(key.replace("_", " "), value)
    return run, board


async def until(store: SeriesStore[SeriesKey], seen: Callable[[View], bool]) -> View:
    """The first view of which that is true."""
    found: asyncio.Future[View] = asyncio.get_running_loop().create_future()

    def look(view: View) -> None:
        if seen(view) and not found.done():
            found.set_result(view)

    looking = asyncio.create_task(observe(runtime_root(), WaitBoard(), store, look))
    try:
        return await asyncio.wait_for(found, 60)
    finally:
        looking.cancel()
        await asyncio.wait([looking])


def test_what_a_service_says_becomes_series(tmp_path: Path) -> None:
    metrics = ExecutorMetrics()
    metrics.gate_open_ratio.set(0.25)
    store: SeriesStore[SeriesKey] = SeriesStore()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(serve(0, metrics.registry)))
        run, _ = service(stack, tmp_path, "executor", metrics=server.url, metrics_gone="http://127.0.0.1:1/")
        key = SeriesKey(Source(run.run_id), "gate")
        view = asyncio.run(until(store, lambda view: key in view.latest))
    assert view.latest[key] == 0.25
    assert view.services[run.run_id].life is Life.LIVE
    assert store.columns([key]).values[key][-1] == 0.25
    assert list(view.problems) == [Source(run.run_id, "gone")]


def test_a_service_that_hangs_costs_the_others_nothing(tmp_path: Path) -> None:
    metrics = ExecutorMetrics()
    metrics.gate_open_ratio.set(0.25)
    store: SeriesStore[SeriesKey] = SeriesStore()

    async def main() -> View:
        never = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
        port = never.sockets[0].getsockname()[1]
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(contextlib.closing(serve(0, metrics.registry)))
            for number in range(10):
                service(stack, tmp_path, f"hung-{number}", metrics=f"http://127.0.0.1:{port}/{number}")
            run, _ = service(stack, tmp_path, "executor", metrics=server.url)
            key = SeriesKey(Source(run.run_id), "gate")
            view = await until(store, lambda view: key in view.latest and len(store.columns().times) > 2)
        never.close()
        return view

    view = asyncio.run(main())
    assert len(view.problems) == 10


def test_a_service_that_ends_is_remembered_and_no_longer_asked(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run, board = service(stack, tmp_path, "run", metrics="http://127.0.0.1:1/")
        board.part("trainer", "rollout")
        written(run, "trainer")
        services = updated({}, read_services(runtime_root(), time.time()), 100.0)
        assert targets(services.values()) == {Source(run.run_id): "http://127.0.0.1:1/"}
    after = updated(services, read_services(runtime_root(), time.time()), 160.0)
    assert after[run.run_id].life is Life.ENDED
    assert after[run.run_id].page == services[run.run_id].page
    assert targets(after.values()) == {}
    assert updated(after, [], 100.0 + REMEMBERED_S + 1) == {}


def written(run: Run, text: str) -> None:
    """Waits until that is on a run's status page."""
    page, deadline = run.runtime / "status.json", time.monotonic() + 30
    while not page.exists() or text not in page.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_dead_service_is_shown_until_it_is_swept(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run, board = service(stack, tmp_path, "run")
        board.part("trainer", "rollout")
        written(run, "trainer")
        dead = runtime_root() / "run-20260101-000000-abcd"
        shutil.copytree(run.runtime, dead, ignore=shutil.ignore_patterns("lock"))
        services = updated({}, read_services(runtime_root(), time.time()), 1.0)
        shutil.rmtree(dead)
    assert services[dead.name].life is Life.DEAD
    assert list(services) == sorted(services)


def test_what_is_remembered_is_bounded() -> None:
    def ended(number: int) -> Service:
        page = _page(f"run-{number:04}")
        return Service(page.run_id, Life.LIVE, page, "", float(number))

    before = {one.service_id: one for one in map(ended, range(100))}
    after = updated(before, [], 100.0)
    assert sorted(after) == [f"run-{number:04}" for number in range(100 - REMEMBERED_MAX, 100)]


def test_addresses_of_one_service_are_bounded_and_texts() -> None:
    facts = {f"metrics {number}": f"http://127.0.0.1/{number}" for number in range(100)}
    page = _page("run-1").model_copy(update={"facts": {"metrics": 7, "metricsx": "http://a/", **facts}})
    found = targets([Service("run-1", Life.LIVE, page, "", 0.0)])
    assert len(found) == TARGETS_MAX
    assert Source("run-1") not in found
    assert found[Source("run-1", "0")] == "http://127.0.0.1/0"


def _page(run_id: str) -> Page:
    return Page(
        run_id=run_id,
        pid=1,
        output="",
        started_s=0.0,
        written_s=0.0,
        write_failures=0,
        parts=[],
        facts={},
        waits=[],
    )
