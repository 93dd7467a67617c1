"""Looks at all services once a second, and keeps what they say.

Invariants
- Nothing that a service does or does not do stops the looking, or delays it for the others.
- Times are of this observer's own clock: they begin at `time.time()` and rise steadily, whatever is done to that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from rose.observer.exposition import Samples
from rose.observer.measures import Measures, SeriesKey, Source
from rose.observer.scraper import Scraper
from rose.observer.series import SeriesStore
from rose.observer.services import Service, read_services, targets, updated
from rose.waits import WaitBoard

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """One look. `latest` are the figures of this moment; `problems` are those of addresses that do not answer well."""

    at_s: float
    services: Mapping[str, Service]
    latest: Mapping[SeriesKey, float]
    problems: Mapping[Source, str]


class Observer:
    """All services under `root`. Each look goes into `store`, then `seen` is told it. Run by `observe`."""

    def __init__(
        self,
        root: Path,
        http: ClientSession,
        waits: WaitBoard,
        store: SeriesStore[SeriesKey],
        seen: Callable[[View], None],
    ) -> None:
        self._store = store
        self._root = root
        self._http = http
        self._waits = waits
        self._seen = seen
        self._services: dict[str, Service] = {}
        self._measures = Measures()
        self._scrapers: dict[Source, tuple[Scraper, asyncio.Task[None]]] = {}
        self._began_s = time.time() - time.monotonic()

    def _now_s(self) -> float:
        return self._began_s + time.monotonic()

    async def run(self) -> None:
        """Look every `EVERY_S`, until cancelled."""
        try:
            while True:
                due_s = time.monotonic() + EVERY_S
                self._seen(await self._look())
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        finally:
            await self._follow({})

    async def _look(self) -> View:
        read = await asyncio.to_thread(read_services, self._root, time.time())
        now_s = self._now_s()
        self._services = updated(self._services, read, now_s)
        running = [service for service in self._services.values() if service.runs]
        self._measures.keep({service.service_id for service in running})
        await self._follow(targets(running))
        latest = self._measures.at(now_s)
        self._store.append(now_s, latest)
        problems = {source: scraper.problem for source, (scraper, _) in self._scrapers.items() if scraper.problem}
        return View(now_s, self._services, latest, problems)

    async def _follow(self, wanted: Mapping[Source, str]) -> None:
        """Scrape these addresses and no others."""
        gone = [source for source, (scraper, _) in self._scrapers.items() if wanted.get(source) != scraper.url]
        tasks = []
        for source in gone:
            _, task = self._scrapers.pop(source)
            task.cancel()
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks)
        for source in wanted.keys() - self._scrapers.keys():
            self._scrapers[source] = self._scraping(source, wanted[source])

    def _scraping(self, source: Source, url: str) -> tuple[Scraper, asyncio.Task[None]]:
        def scraped(samples: Samples) -> None:
            self._measures.scraped(source, self._now_s(), samples)

        whom = f"{source.service} {source.target}".rstrip()
        scraper = Scraper(url, whom, self._http, self._waits, scraped=scraped)
        return scraper, asyncio.create_task(scraper.run(), name=f"metrics of {whom}")


async def observe(root: Path, waits: WaitBoard, store: SeriesStore[SeriesKey], seen: Callable[[View], None]) -> None:
    """Look until cancelled. What it raises is a fault of ours."""
    async with ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0)) as http:
        await Observer(root, http, waits, store, seen).run()
