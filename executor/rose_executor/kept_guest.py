"""The executor's guest as `guest_sleeper` knows it: over its process, its supervisor, and the life that it lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rose.errors import DeadlineExceeded
from rose.logs import logger
from rose_executor.engine_process import EngineProcess
from rose_executor.guest_life import GuestLife
from rose_executor.page_shelf import PageShelf
from rose_executor.supervisor import EngineSupervisor, LiveEngine

log = logger("guest")

_AGAIN_S = 0.2
_TOKEN_S = 600.0
"""Beneath a busy serving engine a guest that is awake may get nothing for minutes."""


class KeptGuest:
    """`life` is the one that it lives now, None between two."""

    def __init__(
        self,
        process: EngineProcess,
        supervisor: EngineSupervisor,
        shelf: PageShelf,
        life: Callable[[], GuestLife | None],
    ) -> None:
        self._process = process
        self._supervisor = supervisor
        self._shelf = shelf
        self._life = life
        self._asked = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.alive else None

    async def computes(self) -> bool:
        """The token is set apart, as all that nobody asked for who samples. One that is not proven yet is not asked.

        When it is cancelled it ends as soon as nothing more can come of what was asked, within `COUNT_TIMEOUT_S`.
        Raises DeadlineExceeded, besides, if no token comes.
        """
        life = self._life()
        if life is None or not life.proven:
            return False
        live = life.live
        await live.waits.within(
            self._until_token(live), "token after waking", live.engine_id, _TOKEN_S, boundary="engine"
        )
        return True

    async def _until_token(self, live: LiveEngine) -> None:
        while True:
            self._asked += 1
            request_id = f"woken-{live.incarnation}-{self._asked}"
            try:
                output = await live.route.generate(
                    request_id, [0], max_tokens=1, temperature=0.0, stop_token_ids=(), top_logprobs=0
                )
            finally:
                try:
                    # A step that is under way may add a token after whoever asked has gone. Only: nobody is ended for
                    # that, for one that was never asked in truth finishes nothing, and one beneath serving is slow.
                    with contextlib.suppress(DeadlineExceeded):
                        await live.finished(request_id)
                finally:
                    self._shelf.set_more_apart(live.incarnation, live.request_tokens(request_id))
            if output.output_ids:
                return
            # Serving kept it from computing for so long that it was given back.
            await asyncio.sleep(_AGAIN_S)

    async def end(self, why: str) -> None:
        life = self._life()
        if life is not None:
            try:
                await life.leave(why)
            except DeadlineExceeded as late:
                # Whoever samples there loses a stream, and goes on with the tokens that it has.
                log.warning("the guest is ended though it may still be offered", why=str(late))
        await self._supervisor.hold_down()

    async def start(self) -> None:
        await self._supervisor.let_up()
