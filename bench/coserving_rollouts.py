"""Rollouts for a guest: so many requests at once, without a pause, each carried on wherever it is given back.

Invariants
- Prompts are random, so no two share a prefix.
- Of a request that the engine gave back everything that it had generated must have arrived: what did not is counted as
  lost, by the engine's own count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rose.errors import EngineError
from rose.records import Finish
from rose.waits import WaitBoard
from rose_executor.page_reader import PageReader
from rose_executor.token_route import EngineLost, RouteOutput, TokenRoute, open_session

SEQS = 64
PROMPT_TOKENS = (32, 256)
ANSWER_TOKENS = (64, 256)
TOKEN_IDS = range(5, 384)
_COUNT_POLL_S = 0.01
_numbers = itertools.count()
"""No two requests of all phases have the same id: the engine counts by it."""


@dataclass(slots=True)
class Tally:
    """What came of rollouts: requests ended, given back on the way, and tokens that were generated and never came."""

    ended: int = 0
    moved: int = 0
    lost_tokens: int = 0


class Rollouts:
    """Work for the guest behind `base_url`, as long as `during` lasts."""

    def __init__(self, base_url: str, page: PageReader, waits: WaitBoard) -> None:
        self._base_url = base_url
        self._page = page
        self._waits = waits

    @contextlib.asynccontextmanager
    async def during(self, seed: int) -> AsyncIterator[Tally]:
        """Keep it busy until the body ends; yields a `Tally`. Raises EngineError if the guest dies of it."""
        tally = Tally()
        async with open_session() as session:
            route = TokenRoute(self._base_url, session, engine_id="guest", waits=self._waits)
            tasks = [
                asyncio.create_task(self._roll(route, random.Random(f"{seed}.{one}"), tally)) for one in range(SEQS)
            ]
            try:
                yield tally
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _roll(self, route: TokenRoute, source: random.Random, tally: Tally) -> None:
        while True:
            context = source.choices(TOKEN_IDS, k=source.randint(*PROMPT_TOKENS))
            left = source.randint(*ANSWER_TOKENS)
            while left > 0:
                request_id = f"rollout-{next(_numbers)}"
                output = await self._asked(route, request_id, context, left)
                context += output.output_ids
                left -= len(output.output_ids)
                if output.finish is Finish.ABORT:
                    tally.moved += 1
                    tally.lost_tokens += await self._generated(request_id) - len(output.output_ids)
            tally.ended += 1

    async def _asked(self, route: TokenRoute, request_id: str, context: list[int], tokens: int) -> RouteOutput:
        try:
            return await route.generate(request_id, context, max_tokens=tokens, temperature=1.0, stop_token_ids=())
        except EngineLost as lost:
            raise EngineError(f"the guest was lost: {lost.what}") from lost

    async def _generated(self, request_id: str) -> int:
        while (count := self._page.request(request_id)) is None or not count.finished:
            await asyncio.sleep(_COUNT_POLL_S)
        return count.tokens
