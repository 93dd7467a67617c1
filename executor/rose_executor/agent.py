"""The executor beside a serving engine: keeps a guest, brings it the run's weights, lends it while serving has slack.

    watch ── looks every 20 ms, writes the quota ──▶ board ◀── serving engine, guest
    guest ── kept alive, asleep or gone, followed and offered (`guest_keeper`)
    show ─── metrics and status; a guest that was frozen is ended, one that somebody stopped is lent to nobody, and what
             would end it after this process is started again if it has died

Invariants
- Serving is never touched: whatever fails here, the quota is renewed no more, and the guest shuts its gate.
- A scheduler or a publisher that is away ends nothing; the open waits say who is missing.
"""

from __future__ import annotations

import asyncio
import time

from rose_executor.agent_figures import AgentFigures
from rose_executor.guest_keeper import GuestKeeper, Joined, ended
from rose_executor.guest_watch import GuestWatch
from rose_executor.lender import Lender
from rose_executor.page_shelf import PageShelf

SHOW_EVERY_S = 0.5
UNSEEN_S = 1.0
"""Without a good look at the board for so long, an executor is not healthy."""


class Agent:
    """`run` it. Everything that it is made of is its owner's to close, when `run` has returned.

    `watch`, `shelf` and `figures` are those of its `guest`.
    """

    def __init__(self, guest: GuestKeeper, watch: GuestWatch, shelf: PageShelf, figures: AgentFigures) -> None:
        self._guest = guest
        self._watch = watch
        self._shelf = shelf
        self._figures = figures

    def alive(self, incarnation: str) -> bool:
        """Whether an incarnation may still generate."""
        return self._guest.alive(incarnation)

    def unhealthy(self) -> str:
        """Why this executor is no guard of its guest just now, "" if it is. From any thread."""
        unseen_s = time.monotonic() - self._watch.looked_at_s
        if unseen_s < UNSEEN_S:
            return ""
        return f"the board was last looked at {unseen_s:.1f} s ago; {self._watch.trouble or 'the executor hangs'}"

    async def run(self, joined: Joined) -> None:
        """Until cancelled. Raises what nothing but its user can mend: a guest that died, or answered wrongly, too
        often; a wrong token."""
        tasks = [
            asyncio.create_task(self._watch.run(), name="watch"),
            asyncio.create_task(self._guest.run(joined), name="guest"),
            asyncio.create_task(self._show(joined.lender), name="show"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            # The guest first, while somebody still watches it.
            for task in (tasks[1], tasks[0], tasks[2]):
                await ended(task)

    async def _show(self, lender: Lender) -> None:
        while True:
            await self._guest.look_for_stopped()
            self._guest.end_if_frozen()
            self._guest.renew_watchdog()
            self._guest.open_s()
            process = self._guest.process
            living = () if process is None else (process.incarnation,)
            self._figures.show(self._watch, self._guest.life, self._guest.lent(), lender, self._shelf.total(living))
            self._guest.show()
            await asyncio.sleep(SHOW_EVERY_S)
