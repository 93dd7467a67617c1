"""Lent engines without an engine: routes that answer as they are told, an executor that counts. Not a test module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from service_tools import LONG_S, Site, site
from stand_ins import END, Answer, Lost, Reply, Silent

from rose.errors import EngineError
from rose.records import VersionSpan
from rose.trainer.books import Books
from rose.trainer.engines import Engines
from rose.trainer.sampler import SampledTurn, SamplingSettings, TurnSampler
from rose.waits import WaitBoard
from rose_executor.counts_client import Counts
from rose_executor.token_page import RequestCount
from rose_executor.token_route import EngineLost, PartialOutput, RouteOutput
from rose_scheduler.client import EngineState, Turn
from rose_scheduler.events import EngineKind, EngineOffered


@dataclass(frozen=True)
class Still:
    """The stream breaks after `ids`; the engine lives, has made `generated`, and does not finish."""

    ids: tuple[int, ...]
    generated: int


@dataclass
class Page:
    """What an incarnation has counted; `retired` tokens are of requests that the page has forgotten."""

    retired: int = 0
    alive: bool = True
    known: bool = True
    counts: dict[str, RequestCount] = field(default_factory=dict)


@dataclass
class Executor:
    """Answers for the engines that it lends; `away`, it does not."""

    pages: dict[str, Page] = field(default_factory=dict)
    away: bool = False
    questions: int = 0
    closed: bool = False

    async def counts(self, incarnation: str, request_ids: Iterable[str] = ()) -> Counts:
        self.questions += 1
        await asyncio.sleep(0)
        if self.away:
            raise EngineError("executor there: no counts: unavailable")
        page = self.pages[incarnation]
        found = {each: page.counts[each] for each in request_ids if each in page.counts}
        total = page.retired + sum(count.tokens for count in page.counts.values())
        return Counts(page.known, page.alive, total, found) if page.known else Counts(False, False, 0, {})

    async def close(self) -> None:
        self.closed = True


@dataclass
class Guest:
    """A lent engine, one incarnation, and its route."""

    engine_id: str
    executor: Executor
    replies: list[Reply | Still]
    asked: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def page(self) -> Page:
        return self.executor.pages[self.engine_id]

    async def generate(self, request_id: str, token_ids: Sequence[int], **_: Any) -> RouteOutput:
        self.asked.append(tuple(token_ids))
        reply = self.replies.pop(0) if self.replies else Answer((END,))
        await asyncio.sleep(0)
        match reply:
            case Answer(ids, version, finish):
                self.page.counts[request_id] = RequestCount(len(ids), version, version, True)
                return RouteOutput(ids, (-0.5,) * len(ids), (VersionSpan(version, 0, len(ids)),), finish, ())
            case Lost(ids, generated, version):
                first, last = (0, 1) if version is None else (version, version)
                self.page.counts[request_id] = RequestCount(generated, first, last, False)
                self.page.alive = False
                raise EngineLost(f"{self.engine_id} was lost", PartialOutput(request_id, ids, (-0.5,) * len(ids)))
            case Still(ids, generated):
                self.page.counts[request_id] = RequestCount(generated, 0, 0, False)
                raise EngineLost(f"{self.engine_id} was silent", PartialOutput(request_id, ids, (-0.5,) * len(ids)))
            case Silent(generated):
                self.page.counts[request_id] = RequestCount(generated, 0, 0, False)
                await asyncio.Event().wait()
        raise AssertionError(reply)


class Fleet:
    """A scheduler, real in all, and lent engines at it; one trajectory `t` that samples on them."""

    def __init__(self, here: Site, books: Books, attempts_max: int = 3) -> None:
        self.here, self.books, self.waits = here, books, WaitBoard()
        self.guests: dict[str, Guest] = {}
        self.executors: dict[str, Executor] = {}
        self.told: list[tuple[str, str, str]] = []
        self.engines = Engines(
            books,
            self.waits,
            route=lambda address, engine_id: self.guests[engine_id],  # type: ignore[arg-type, return-value]
            counts=lambda address: self.executors[address],
            told=lambda *words: self.told.append(words),
        )
        settings = SamplingSettings(1.0, 6, (END,), attempts_max, lease_wait_s=LONG_S, lease_hold_s=LONG_S)
        self.sampler = TurnSampler(here.client, self.engines, books, settings)

    async def lend(self, engine_id: str, *replies: Reply | Still, version: int = 0, most: int = 4) -> Guest:
        executor = self.executors.setdefault(f"counts-of-{engine_id}:1", Executor())
        executor.pages[engine_id] = Page()
        self.guests[engine_id] = Guest(engine_id, executor, list(replies))
        offer = EngineOffered(
            engine_id, engine_id, EngineKind.LENT, f"http://{engine_id}", most, version, f"counts-of-{engine_id}:1"
        )
        await self.here.client.offer(offer)
        await self.here.client.beat(offer, EngineState(version, most, 0.0))
        return self.guests[engine_id]

    async def sample(self, number: int = 0, *, trajectory: str = "t", min_version: int = 0) -> SampledTurn:
        return await self.sampler.sample(Turn(trajectory, "g", number, 2, min_version), [10, 11])

    async def close(self) -> None:
        """As a session ends: the last counts, then the books."""
        await self.engines.close()
        self.books.close()


@asynccontextmanager
async def fleet(books: Books, **options: Any) -> AsyncIterator[Fleet]:
    async with asyncio.timeout(20.0), site() as here:
        made = Fleet(here, books, **options)
        keeping = asyncio.create_task(made.engines.run())
        try:
            yield made
        finally:
            keeping.cancel()
