"""One incarnation of an engine that an executor lends: its tokens come from it, its counts from the executor.

Invariants
- Who wait for a count at the same time share one question; in between the executor is asked about once a second.
- An executor that cannot be asked makes the engine *lost*, until it answers again: no turn goes where nobody counts.
- One that has come up again elsewhere is asked there too: it may have the pages of before.
- What is known of a total never falls, and no error of an executor gets beyond here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from rose.errors import DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose_executor.counts_client import Counts
from rose_executor.token_page import RequestCount
from rose_executor.token_route import TokenRoute

ASK_EVERY_S = 1.0
SHARE_S = 0.05
"""How long a question is held back for others to join it."""
FINAL_TIMEOUT_S = 5.0
"""An engine that lives answers at once; one that stands still for serving may stay so for long."""
NEWS_TIMEOUT_S = 2.0
SETTLE_TIMEOUT_S = 10.0
_AGAIN_S = 0.1
_SOURCES_MAX = 4


class CountsSource(Protocol):
    """A `CountsClient`, as far as it is used here."""

    async def counts(self, incarnation: str, request_ids: Iterable[str] = ()) -> Counts:
        """Raises EngineError or DeadlineExceeded."""
        ...

    async def close(self) -> None: ...


class LentEngine:
    """A `TurnEngine`. `told` hears its state and a few words whenever that changes; `run` keeps the counts fresh."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        route: TokenRoute,
        source: CountsSource,
        waits: WaitBoard,
        told: Callable[[str, str], None],
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.route = route
        self._sources = deque([source], maxlen=_SOURCES_MAX)
        self._waits = waits
        self._told = told
        self._dead = False
        self._silent = "was not asked yet"
        self._state = ""
        self._total = 0
        self._awaited: set[str] = set()
        self._counts: dict[str, RequestCount] = {}
        self._answer: asyncio.Task[None] | None = None
        self._questions: set[asyncio.Task[None]] = set()
        self._met: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        return self._dead or bool(self._silent)

    def total_tokens(self) -> int:
        return self._total

    def request_tokens(self, request_id: str) -> int:
        count = self._counts.get(request_id)
        return count.tokens if count is not None else 0

    def also_at(self, source: CountsSource) -> None:
        """A later incarnation of the engine is counted there: whoever does so may know of this one."""
        if source not in self._sources:
            self._sources.appendleft(source)

    async def met(self) -> None:
        """Return once its executor was asked for the first time, whatever it answered."""
        if self._met is None:
            self._met = asyncio.create_task(self._heard())
        await asyncio.shield(self._met)

    async def run(self, heard: Callable[[], None]) -> None:
        """Ask about once a second until it is dead; `heard` is called after each answer."""
        while not self._dead:
            await asyncio.sleep(ASK_EVERY_S)
            await self._heard()
            heard()

    async def final_request(self, request_id: str) -> RequestCount | None:
        """See `TurnEngine`. Of one whose count cannot be had in time, `final` may tell it later."""
        self._awaited.add(request_id)
        try:
            count = await self._waits.within(
                self._until_final(request_id), "final count", self.engine_id, FINAL_TIMEOUT_S, boundary="engine"
            )
        except DeadlineExceeded:
            return self._counts.get(request_id)
        self.forget(request_id)
        return count

    def final(self, request_id: str) -> RequestCount | None:
        """The count of a request to which nothing is added any more, None if there is none yet."""
        count = self._counts.get(request_id)
        return count if count is not None and (self._dead or count.finished) else None

    def forget(self, request_id: str) -> None:
        """Ask about this request no longer."""
        self._awaited.discard(request_id)
        self._counts.pop(request_id, None)

    async def news_of_death(self) -> None:
        with contextlib.suppress(DeadlineExceeded):
            await self._waits.within(
                self._until_lost(), "news of its death", self.engine_id, NEWS_TIMEOUT_S, boundary="engine"
            )

    async def settle(self, request_ids: Collection[str]) -> str:
        """Learn the final total, and the counts of these requests, which are over here. Why not, if that cannot be."""
        if self._dead and not request_ids:
            return ""
        self._awaited.update(request_ids)
        try:
            await self._waits.within(
                self._until_settled(request_ids), "last counts", self.engine_id, SETTLE_TIMEOUT_S, boundary="engine"
            )
        except DeadlineExceeded as late:
            return self._silent or f"{late.what}: it has not finished all that was asked of it"
        return ""

    def close(self) -> None:
        """Ask nothing more, and hear no answer."""
        for question in self._questions:
            question.cancel()

    def known(self, request_id: str) -> RequestCount | None:
        """What `settle` has learned of a request."""
        return self._counts.get(request_id)

    async def _until_final(self, request_id: str) -> RequestCount:
        while True:
            await self._heard()
            count = self._counts.get(request_id)
            if not self._silent and (self._dead or (count is not None and count.finished)):
                return RequestCount(0, None, None, True) if count is None else replace(count, finished=True)
            await asyncio.sleep(_AGAIN_S)

    async def _until_lost(self) -> None:
        while not self.lost:
            await self._heard()
            await asyncio.sleep(_AGAIN_S)

    async def _until_settled(self, request_ids: Collection[str]) -> None:
        """A request that is not on the page was never begun, or is long over: then two totals in a row agree."""
        before = -1
        while True:
            await self._heard()
            found = [self._counts[each] for each in request_ids if each in self._counts]
            over = self._dead or all(count.finished for count in found)
            if not self._silent and over and (self._dead or before == self._total or not request_ids):
                return
            before = self._total
            await asyncio.sleep(_AGAIN_S)

    async def _heard(self) -> None:
        """Return once the executor was asked, from now on, and has answered or not."""
        if self._answer is None:
            self._answer = asyncio.create_task(self._ask_soon())
            self._questions.add(self._answer)
            self._answer.add_done_callback(self._questions.discard)
        await asyncio.shield(self._answer)

    async def _ask_soon(self) -> None:
        await asyncio.sleep(SHARE_S)
        self._answer = None  # who comes from here on is not in this question
        source = self._sources[0]
        try:
            self._take(await source.counts(self.incarnation, tuple(self._awaited)))
        except (EngineError, DeadlineExceeded) as error:
            self._silent = error.what
        if self._silent and source is self._sources[0]:
            self._sources.rotate(-1)
        state = "dead" if self._dead else "silent" if self._silent else "lent"
        if state != self._state:
            self._state = state
            self._told(state, self._silent)

    def _take(self, counts: Counts) -> None:
        if not counts.known:
            self._silent = "its executor does not know this incarnation"
            return
        self._silent = ""
        self._dead = self._dead or not counts.alive
        self._total = max(self._total, counts.total_tokens)
        self._counts.update((each, count) for each, count in counts.requests.items() if each in self._awaited)
