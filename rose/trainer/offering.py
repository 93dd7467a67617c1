"""The run's own engines at its scheduler: each incarnation is offered from its first answer to its death.

Invariants
- An engine that is between two versions, or whose weights are mixed, is offered with no room.
- A dead incarnation is withdrawn at once, so that no turn waits for its silence to be noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rose.errors import DeadlineExceeded, SchedulerError
from rose.logs import logger
from rose_executor.supervisor import LiveEngine
from rose_scheduler.client import EngineState, SchedulerClient
from rose_scheduler.events import EngineKind, EngineOffered

log = logger("offering")

BEAT_EVERY_S = 0.2
"""A version that an engine has taken is known to the scheduler that much later; a step waits for it."""

ServingVersion = Callable[[str], int | None]
"""The version that an engine samples with now, None while it must not sample."""


class Offering:
    """Offers incarnations as `requests_max` slots each. `run` must run for anything to happen."""

    def __init__(self, scheduler: SchedulerClient, requests_max: int) -> None:
        self._scheduler = scheduler
        self._requests_max = requests_max
        self._born: asyncio.Queue[LiveEngine] = asyncio.Queue()

    def joins(self, engine: LiveEngine) -> None:
        """A new incarnation answers."""
        self._born.put_nowait(engine)

    async def run(self, serving: ServingVersion) -> None:
        """Keep every live incarnation offered until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                engine = await self._born.get()
                group.create_task(self._offer(engine, serving), name=f"offer of {engine.engine_id}")

    async def _offer(self, engine: LiveEngine, serving: ServingVersion) -> None:
        offered = EngineOffered(
            engine.engine_id,
            engine.incarnation,
            EngineKind.DEDICATED,
            engine.base_url,
            self._requests_max,
            serving(engine.engine_id) or 0,
        )

        def state() -> EngineState:
            version = serving(engine.engine_id)
            page, slots = engine.page, 0 if version is None else self._requests_max
            return EngineState(version or 0, slots, 0.0, page.kv_tokens, page.token_s)

        keeping = asyncio.create_task(self._scheduler.keep_offered(offered, state, every_s=BEAT_EVERY_S))
        dying = asyncio.create_task(engine.dead.wait())
        try:
            await asyncio.wait({keeping, dying}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                await keeping
        finally:
            keeping.cancel()
            dying.cancel()
        with contextlib.suppress(SchedulerError, DeadlineExceeded):
            await self._scheduler.withdraw(offered, "its process ended")
