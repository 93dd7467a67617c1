"""A child that the demo can do without for a moment: started again when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rose.demo.child import DemoChild, Program, start_child
from rose.demo.service_page import POLL_S, page_now
from rose.errors import ClusterError, RoseError
from rose.logs import logger
from rose.waits import WaitBoard

log = logger("director")

RESTARTS_MAX = 3
_END_S = 20.0


@dataclass(slots=True)
class KeptChild:
    """Keeps `program` running: at most `RESTARTS_MAX` starts after the first, then the demo goes on without it.

    `told` is given its state and a word on it, `started` the id of each process.
    """

    program: Program
    place: Callable[[int], None]
    waits: WaitBoard
    told: Callable[[str, str], None]
    started: Callable[[int], None] = lambda pid: None
    child: DemoChild | None = None
    _given_up: bool = False

    async def keep(self) -> None:
        """Returns when it is given up. Cancelled, it leaves what runs to `stop`."""
        for restarts in range(RESTARTS_MAX + 1):
            try:
                self.child = await start_child(self.program, self.place, self.waits)
                self.started(self.child.pid)
                self.told("running", f"started again, {restarts} times" if restarts else "")
                await self.child.wait()
                how = self.child.death()
            except RoseError as error:
                how = str(error)
            self.told("dead", how.splitlines()[0])
            log.warning("it died", what=self.program.name, how=how.splitlines()[0])
        self._given_up = True
        self.told("given up", f"after {RESTARTS_MAX} restarts; the rest goes on")

    async def fact(self, key: str, timeout_s: float) -> str:
        """A fact of the page of whichever process runs. Raises ClusterError once it is given up, DeadlineExceeded."""
        return await self.waits.within(self._fact(key), key, self.program.name, timeout_s, boundary="cluster")

    async def _fact(self, key: str) -> str:
        while not self._given_up:
            page = None if self.child is None or self.child.exit_code is not None else page_now(self.child)
            if page is not None and page.facts.get(key):
                return str(page.facts[key])
            await asyncio.sleep(POLL_S)
        raise ClusterError(f"{self.program.name} was given up before it had told about itself")

    async def stop(self) -> None:
        """End what runs."""
        if self.child is not None:
            await self.child.stop(_END_S)
