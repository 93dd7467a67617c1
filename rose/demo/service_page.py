"""Finds the status page of a child that is a service of its own, and reads facts from it."""

from __future__ import annotations

import asyncio
import time

from rose.demo.child import DemoChild
from rose.errors import ClusterError
from rose.processes import session_of
from rose.runs import list_runs, runtime_root
from rose.status import Page, read_status
from rose.waits import WaitBoard

POLL_S = 0.1


async def fact_of(child: DemoChild, key: str, timeout_s: float, waits: WaitBoard) -> str:
    """A fact of the child's page, once it is there. Raises ClusterError if the child ends first, DeadlineExceeded."""
    return await waits.within(_fact(child, key), key, child.name, timeout_s, boundary="cluster")


async def page_of(child: DemoChild, timeout_s: float, waits: WaitBoard) -> Page:
    """The child's page, once there is one. Raises as `fact_of` does."""
    return await waits.within(_page(child), "status page", child.name, timeout_s, boundary="cluster")


def page_now(child: DemoChild) -> Page | None:
    """The child's page as it is, None as long as there is none."""
    for found in list_runs(runtime_root()):
        page = read_status(found, time.time()).page
        if found.alive and page is not None and session_of(page.pid) == child.pid:
            return page
    return None


async def _fact(child: DemoChild, key: str) -> str:
    while True:
        value = (await _page(child)).facts.get(key)
        if value:
            return str(value)
        await asyncio.sleep(POLL_S)


async def _page(child: DemoChild) -> Page:
    while child.exit_code is None:
        page = page_now(child)
        if page is not None:
            return page
        await asyncio.sleep(POLL_S)
    raise ClusterError(f"{child.name} {child.death()}, before it had told about itself")
