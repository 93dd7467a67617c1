"""The engines that turns are sampled on, found by their lease: the run's own, and those that executors lend.

Invariants
- Every incarnation that a turn is sent to is watched by the books before.
- Before the books are closed each lent engine is asked for its last word. Of one that cannot be asked any more, what
  was booked stands, and the books say so by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from rose.errors import EngineError
from rose.logs import logger
from rose.trainer.books import Books
from rose.trainer.lent_engine import CountsSource, LentEngine
from rose.trainer.turn_engine import TurnEngine
from rose.waits import WaitBoard
from rose_executor.token_route import TokenRoute
from rose_scheduler.client import Lease

log = logger("engines")


class Engines:
    """`route` makes the route to an engine, given its address and id; `counts` a client of an executor, of its address.

    `told` hears an engine's id, its state, and a few words.
    """

    def __init__(
        self,
        books: Books,
        waits: WaitBoard,
        *,
        route: Callable[[str, str], TokenRoute],
        counts: Callable[[str], CountsSource],
        told: Callable[[str, str, str], None],
    ) -> None:
        self._books = books
        self._waits = waits
        self._route = route
        self._counts = counts
        self._told = told
        self._own: dict[tuple[str, str], TurnEngine] = {}
        self._lent: dict[tuple[str, str], LentEngine] = {}
        self._sources: dict[str, CountsSource] = {}
        self._new: asyncio.Queue[LentEngine] = asyncio.Queue()

    def add_own(self, engine: TurnEngine) -> None:
        """An incarnation of the run's own engine, before anyone is sent there."""
        self._books.watch(engine)
        self._own[engine.engine_id, engine.incarnation] = engine

    async def behind(self, lease: Lease) -> TurnEngine:
        """The engine of a lease, which may be lost. Raises EngineError if its tokens would be counted by nobody."""
        key = (lease.engine_id, lease.incarnation)
        own = self._own.get(key)
        if own is not None:
            return own
        if key not in self._lent:
            if not lease.counts_address:
                raise EngineError(
                    f"engine {lease.engine_id} at {lease.address} is not this run's, and was offered without the"
                    " address of its counts",
                    expected="engines that this run started, or that an executor lends",
                    to_do="withdraw it from the scheduler",
                )
            self._lent[key] = self._new_lent(lease)
        lent = self._lent[key]
        await lent.met()
        return lent

    async def run(self) -> None:
        """Keep the counts of lent engines fresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                engine = await self._new.get()
                counting = engine.run(partial(self._recount, engine))
                group.create_task(counting, name=f"counts of {engine.engine_id}")

    async def close(self) -> None:
        """Have the last counts of lent engines booked: once nothing is sampled, before the books are closed."""
        await asyncio.gather(*(self._settle(engine) for engine in self._lent.values()))
        for engine in self._lent.values():
            engine.close()
        for source in self._sources.values():
            await source.close()

    def _new_lent(self, lease: Lease) -> LentEngine:
        source = self._sources.get(lease.counts_address)
        if source is None:
            source = self._sources[lease.counts_address] = self._counts(lease.counts_address)
        engine_id, incarnation = lease.engine_id, lease.incarnation
        for (earlier_id, _), earlier in self._lent.items():
            if earlier_id == engine_id:
                earlier.also_at(source)

        def told(state: str, words: str) -> None:
            if state == "silent":
                log.warning("a lent engine gets no turns", engine_id=engine_id, incarnation=incarnation, why=words)
            self._told(engine_id, state, words or lease.address)

        engine = LentEngine(engine_id, incarnation, self._route(lease.address, engine_id), source, self._waits, told)
        self._books.watch(engine, lent=True)
        self._new.put_nowait(engine)
        return engine

    def _recount(self, engine: LentEngine) -> None:
        """Book what was not known in time as soon as it is: a page has room for a bounded number of requests."""
        for request_id in self._books.unsure(engine):
            count = engine.final(request_id)
            if count is not None:
                self._books.recount(request_id, count.tokens)
                engine.forget(request_id)

    async def _settle(self, engine: LentEngine) -> None:
        unsettled, unsure = self._books.unsettled(engine), self._books.unsure(engine)
        why = await engine.settle([*unsettled, *unsure])
        for request_id in unsure:
            count = engine.known(request_id)
            if count is not None:
                self._books.recount(request_id, count.tokens)
        if why and self._books.trust(engine, why):
            log.warning("a lent engine's last counts are missing", engine_id=engine.engine_id, why=why)
            self._told(engine.engine_id, "lost", why)
