"""The page in a real browser, fed by a real dashboard that watches services with real /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browsing
from dashboard_process import DashboardProcess
from fleet import Fleet, fleet

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not looked at in a browser"),
    pytest.mark.usefixtures("runtime_dir"),
]
BADGE = "document.getElementById('badge')?.textContent ?? ''"
CHARTS = "[...document.querySelectorAll('.chart h3')].map((one) => one.textContent)"
TEXT = "(document.getElementById('app')?.innerText ?? '')"


async def moving(shown: Fleet) -> None:
    while True:
        shown.move()
        await asyncio.sleep(0.5)


async def nothing_runs(browser: Browser) -> None:
    await browser.until(f"{TEXT}.includes('Nothing runs here')")
    assert "rose demo" in await browser.evaluate(TEXT)
    assert await browser.evaluate(CHARTS) == []


async def charts_are_drawn(browser: Browser) -> None:
    titles = await browser.until(f"({CHARTS}).length == 8 && {CHARTS}")
    assert len(set(titles)) == 8
    # Each chart has a figure for each of its lines, under the cursor or at its end.
    await browser.until("[...document.querySelectorAll('.u-legend .u-value')].every((one) => one.textContent != '–')")
    assert await browser.evaluate("document.querySelectorAll('.uplot canvas').length") == 8
    ink = "(canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((one) => one)"
    assert await browser.evaluate(f"[...document.querySelectorAll('.uplot canvas')].every({ink})")


async def all_is_said(browser: Browser) -> None:
    text = await browser.evaluate(TEXT)
    for words in (
        "TTFT within SLO",
        "of at most 310 ms",
        "Lent: the gate was open",
        "Token ledger",
        "environment",
        "step",
    ):
        assert words in text
    assert re.search(r"engine-0\s*dedicated", text)
    assert re.search(r"executor\s*lent", text)


async def nothing_that_was_said_runs(browser: Browser) -> None:
    assert "<img src=x" in await browser.evaluate(TEXT)
    assert await browser.evaluate("document.querySelectorAll('img').length") == 0
    assert await browser.evaluate("document.title") == "ROSE dashboard"


async def a_time_can_be_chosen_by_key(browser: Browser) -> None:
    pressed = "document.querySelector('[aria-pressed=true]').textContent"
    assert await browser.evaluate(pressed) == "5 min"
    await browser.evaluate("document.querySelectorAll('.spans button')[2].focus()")
    for kind in ("keyDown", "keyUp"):
        await browser.call(
            "Input.dispatchKeyEvent", type=kind, key=" ", code="Space", text=" ", windowsVirtualKeyCode=32
        )
    assert await browser.evaluate(pressed) == "all"


async def it_fits(browser: Browser, width: int) -> None:
    await browser.look(width, 900, "dark")
    await browser.until(f"document.documentElement.scrollWidth <= {width} && innerWidth == {width}")
    await browser.until("[...document.querySelectorAll('.uplot')].every((one) => one.clientWidth <= innerWidth)")


def test_the_page_shows_what_runs_and_says_when_it_is_stale(tmp_path: Path) -> None:
    async def main() -> None:
        dashboard = DashboardProcess(tmp_path)
        async with browsing(tmp_path / "profile") as browser:
            with contextlib.closing(dashboard):
                await browser.look(1360, 900, "light")
                await browser.goto(dashboard.url)
                await nothing_runs(browser)
                with fleet(tmp_path) as shown:
                    mover = asyncio.create_task(moving(shown))
                    await charts_are_drawn(browser)
                    await all_is_said(browser)
                    await nothing_that_was_said_runs(browser)
                    await a_time_can_be_chosen_by_key(browser)
                    await it_fits(browser, 420)
                    assert (await browser.evaluate(BADGE)).startswith("live")
                    mover.cancel()
                await browser.until(f"{TEXT}.includes('ended')")
                assert browser.complaints == []
                assert dashboard.end(9) == -9
            await browser.until(f"({BADGE}).startsWith('reconnecting') || ({BADGE}).startsWith('stale')")
            await browser.until(f"({BADGE}).startsWith('stale')")
            assert await browser.evaluate("document.querySelector('main').className") == "stale"
            assert all("net::ERR_" in complaint for complaint in browser.complaints)
            again = DashboardProcess(tmp_path, "--port", dashboard.url.rpartition(":")[2].strip("/"))
            with contextlib.closing(again):
                await browser.until(f"({BADGE}).startsWith('live')")
                assert await browser.evaluate("document.querySelector('main').className") == "live"

    asyncio.run(main())


def test_fifty_services_are_shown_closed_and_can_be_searched(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            shown = Fleet(tmp_path, stack)
            for number in range(46):
                shown.service(f"spare-{number}").part("idle", "ready", f"spare number {number}")
            dashboard = stack.enter_context(contextlib.closing(DashboardProcess(tmp_path)))
            async with browsing(tmp_path / "profile") as browser:
                await browser.look(1360, 900, "dark")
                await browser.goto(dashboard.url)
                services = "document.querySelectorAll('.service').length"
                await browser.until(f"{services} == 50")
                assert await browser.evaluate("document.querySelectorAll('.service[open]').length") == 0
                await browser.evaluate("document.querySelector('input[type=search]').focus()")
                await browser.call("Input.insertText", text="spare number 33")
                await browser.until(f"{services} == 1")
                assert browser.complaints == []

    asyncio.run(main())
