"""What is answered over HTTP, and how looks reach the pages that are open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose.dashboard.app import HEALTHY_WITHIN_S, make_app
from rose.dashboard.hub import PENDING_MAX, VIEWERS_MAX, Hub
from rose.metrics import DashboardMetrics
from rose.observer.measures import SeriesKey, Source
from rose.observer.observer import View
from rose.observer.series import SeriesStore
from rose.observer.services import Life, Service
from rose.status import Page
from rose.waits import WaitBoard

KEY = SeriesKey(Source("executor-20260801-120000-abcd"), "gate")
ID = "executor-20260801-120000-abcd||gate|"
LOST = SeriesKey(Source("executor-20260801-120000-abcd"), "slots")


class Desk:
    """A hub that is told looks by hand."""

    def __init__(self) -> None:
        self.store: SeriesStore[SeriesKey] = SeriesStore()
        self.metrics = DashboardMetrics()
        self.waits = WaitBoard()
        self.hub = Hub(self.store, self.waits, self.metrics)
        self.now_s = 100.0
        self.app = make_app(self.hub, self.metrics.registry, now_s=lambda: self.now_s)

    def look(self, at_s: float, **values: float) -> None:
        latest = {KEY: values["gate"], LOST: 3.0} if "gate" in values else {}
        self.store.append(at_s, latest)
        self.hub.seen(View(at_s, {}, latest, {}))

    def get(self, path: str, host: str = "127.0.0.1:8700", method: str = "GET") -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
                return await client.request(method, path, headers={"host": host})

        return asyncio.run(ask())


def event(raw: bytes) -> tuple[str, Any]:
    name, data = raw.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_the_state_holds_what_charts_show_and_its_past() -> None:
    desk = Desk()
    desk.look(100.0, gate=0.123456789)
    desk.look(101.0)
    desk.look(102.0, gate=0.5)
    told = desk.get("/api/state").json()
    assert told["times"] == [100.0, 101.0, 102.0]
    assert told["values"] == {ID: [0.12346, None, 0.5]}
    assert [chart["chart_id"] for chart in told["state"]["charts"]] == ["gate"]
    assert told["state"]["idle"]


@pytest.mark.parametrize("path", ["/", "/assets/main.js", "/api/state", "/healthz", "/metrics", "/nowhere"])
def test_every_answer_carries_the_policy(path: str) -> None:
    answer = Desk().get(path)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers.get_list("content-security-policy") == [policy]


def test_the_page_loads_nothing_that_is_not_here() -> None:
    desk = Desk()
    page = desk.get("/").text
    loaded = [part.partition('"')[0] for name in ('src="', 'href="') for part in page.split(name)[1:]]
    assert len(loaded) == 5
    for path in loaded:
        answer = desk.get(path)
        assert answer.status_code == 200
        assert len(answer.content) > 100
    assert desk.get("/assets/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path", ["/assets/../app.py", "/assets/%2e%2e%2fapp.py", "/assets/LICENSE", "/docs", "/openapi.json"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert Desk().get(path).status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "localhost.", "[::2]:80", "a:b:80"])
def test_a_name_of_elsewhere_is_not_answered(host: str) -> None:
    desk = Desk()
    desk.look(100.0, gate=1.0)
    answer = desk.get("/api/state", host)
    assert answer.status_code == 421
    assert "executor" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]", "[::1]:99"])
def test_loopback_is_answered_by_all_its_names(host: str) -> None:
    assert Desk().get("/", host).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method: str) -> None:
    desk = Desk()
    for path in ("/", "/api/state", "/api/events", "/metrics", "/healthz"):
        assert desk.get(path, method=method).status_code == 405


def test_health_is_that_it_looks() -> None:
    desk = Desk()
    assert desk.get("/healthz").status_code == 503
    desk.look(100.0)
    desk.now_s = 100.0 + HEALTHY_WITHIN_S
    assert desk.get("/healthz").text == "ok\n"
    desk.now_s += 1
    assert desk.get("/healthz").status_code == 503
    assert desk.get("/healthz").text == "not looked for 6 s\n"


def test_its_own_metrics_scrape_clean() -> None:
    desk = Desk()
    desk.look(100.0, gate=1.0)
    families = {one.name: one for one in text_string_to_metric_families(desk.get("/metrics").text)}
    assert families["rose_dashboard_series"].samples[0].value == 2
    assert "rose_open_waits" in families


def test_what_a_run_said_last_is_kept_for_as_long_as_it_is_remembered() -> None:
    desk = Desk()
    run_id = "lake-20260801-120000-abcd"
    page = Page(
        run_id=run_id,
        pid=1,
        output="",
        started_s=0.0,
        written_s=0.0,
        write_failures=0,
        parts=[],
        facts={"steps": 9},
        waits=[],
    )
    latest = {SeriesKey(Source(run_id), "account", "trained"): 70.0}
    for at_s, life, said in ((1.0, Life.LIVE, latest), (2.0, Life.ENDED, {})):
        desk.hub.seen(View(at_s, {run_id: Service(run_id, life, page, "", at_s)}, said, {}))
        assert desk.hub.whole()["state"]["runs"][0]["accounts"] == [["trained", 70.0]]
    desk.hub.seen(View(3.0, {}, {}, {}))
    desk.hub.seen(View(4.0, {run_id: Service(run_id, Life.ENDED, page, "", 4.0)}, {}, {}))
    assert desk.hub.whole()["state"]["runs"][0]["accounts"] == []


async def next_of(events: AsyncIterator[bytes]) -> tuple[str, Any]:
    return event(await asyncio.wait_for(anext(events), 30))


def test_a_page_gets_the_whole_first_then_what_changes() -> None:
    async def main() -> None:
        desk = Desk()
        desk.look(100.0, gate=0.5)
        events = desk.hub.events()
        name, whole = await next_of(events)
        assert (name, whole["values"]) == ("whole", {ID: [0.5]})
        desk.look(101.0, gate=0.6)
        name, look = await next_of(events)
        assert (name, look["at_s"], look["values"], look["state"]) == ("look", 101.0, {ID: 0.6}, {})
        desk.look(102.0)
        assert (await next_of(events))[1]["values"] == {}
        assert desk.metrics.registry.get_sample_value("rose_dashboard_viewers") == 1
        await events.aclose()
        assert desk.metrics.registry.get_sample_value("rose_dashboard_viewers") == 0

    asyncio.run(main())


def test_a_page_that_comes_before_the_first_look_waits_for_it() -> None:
    async def main() -> None:
        desk = Desk()
        events = desk.hub.events()
        first = asyncio.create_task(next_of(events))
        await asyncio.sleep(0.01)
        assert [wait.what for wait in desk.waits.snapshot()] == ["next look"]
        desk.look(100.0, gate=0.5)
        assert (await first)[0] == "whole"
        await events.aclose()

    asyncio.run(main())


def test_a_page_that_falls_behind_gets_a_fresh_whole_and_costs_no_more_than_its_queue() -> None:
    async def main() -> None:
        desk = Desk()
        desk.look(100.0, gate=0.5)
        slow, quick = desk.hub.events(), desk.hub.events()
        assert (await next_of(slow))[0] == (await next_of(quick))[0] == "whole"
        for second in range(1, 3 * PENDING_MAX):
            desk.look(100.0 + second, gate=0.5)
            assert (await next_of(quick))[0] == "look"
            assert max(len(viewer.pending) for viewer in desk.hub._viewers) <= PENDING_MAX
        name, whole = await next_of(slow)
        assert (name, len(whole["times"])) == ("whole", 3 * PENDING_MAX)
        desk.look(200.0, gate=0.7)
        assert (await next_of(slow))[1]["at_s"] == 200.0
        assert desk.metrics.registry.get_sample_value("rose_dashboard_snapshots_total") == 3
        await slow.aclose()
        await quick.aclose()

    asyncio.run(main())


def test_closing_ends_every_stream() -> None:
    async def main() -> None:
        desk = Desk()
        desk.look(100.0)
        events = desk.hub.events()
        await next_of(events)
        ending = asyncio.create_task(anext(events, b""))
        await asyncio.sleep(0.01)
        desk.hub.close()
        assert await asyncio.wait_for(ending, 30) == b""

    asyncio.run(main())


def test_pages_are_bounded() -> None:
    async def main() -> None:
        desk = Desk()
        desk.look(100.0)
        pages = [desk.hub.events() for _ in range(VIEWERS_MAX)]
        for page in pages:
            await next_of(page)
        transport = httpx.ASGITransport(desk.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/api/events")).status_code == 503
        for page in pages:
            await page.aclose()

    asyncio.run(main())
