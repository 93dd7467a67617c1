"""One process that plays episodes, seen from the run; a new one takes its place when it is lost.

Invariants
- A worker that dies, or does not answer long after the environment's own deadline, costs the episodes that it had
  open, each of which fails as an environment does. The next episode gets a new process.
- Of several episodes that wait for the new process, one starts it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from rose.config import EnvironmentConfig
from rose.errors import ClusterError, DeadlineExceeded, EnvironmentFailed, RoseError
from rose.logs import logger
from rose.trainer.environment_rank import EnvironmentRank
from rose.trainer.rank import Rank

log = logger("environment")

PATIENCE_S = 30.0
"""How much later than the environment's own deadline a worker may answer. One that does not is stuck as a whole."""
END_TIMEOUT_S = 15.0
"""More than the deadlines of the closes that it is made of."""


class EnvironmentWorker:
    """One place where episodes are played. `make` makes a rank that has not been started.

    `told` hears what has become of it: a state and a few words.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Rank],
        config: EnvironmentConfig,
        told: Callable[[str, str], None],
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self.episodes = 0
        self.lost = 0
        self._make = make
        self._config = config
        self._told = told
        self._start_timeout_s = start_timeout_s
        self._starting: asyncio.Task[Rank] | None = None

    async def start(self) -> None:
        """Raises ConfigError if the environment cannot be loaded there, ClusterError or DeadlineExceeded."""
        await self._live()

    async def ready(self, whom: str) -> Rank:
        """The process that lives now, a new one if the last was lost. Raises EnvironmentFailed if none starts."""
        try:
            return await self._live()
        except RoseError as error:
            raise EnvironmentFailed(f"{whom}: {self.name} does not start: {error.what}", to_do=error.to_do) from error

    async def call(self, rank: Rank, method: str, *arguments: Any, what: str, whom: str, timeout_s: float) -> Any:
        """See `Rank.call`. Whatever goes wrong raises EnvironmentFailed."""
        timeout_s += PATIENCE_S
        try:
            return await rank.call(method, *arguments, what=what, whom=whom, timeout_s=timeout_s)
        except DeadlineExceeded as error:
            self._lose(rank, f"it did not answer for {timeout_s:g} s")
            raise EnvironmentFailed(error.what, to_do=error.to_do) from error
        except ClusterError as error:
            if rank.dead:
                self._lose(rank, error.what)
            raise EnvironmentFailed(f"{whom}: {error.what}", to_do=error.to_do) from error

    async def end(self) -> None:
        """Close what is open, and end the process."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        elif starting.exception() is None:
            rank = starting.result()
            try:
                await rank.call("end", what="end of its episodes", timeout_s=END_TIMEOUT_S)
            except RoseError as error:
                log.warning("episodes are not closed", why=error.what)
            finally:
                rank.kill()
        self._told("ended", "")

    async def _live(self) -> Rank:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except RoseError:
            if self._starting is starting:
                self._starting = None
            raise

    async def _start(self) -> Rank:
        self._told("starting", self._losses())
        rank = self._make()
        try:
            pid = await rank.start(EnvironmentRank, self._config, list(sys.path), timeout_s=self._start_timeout_s)
        except BaseException:
            rank.kill()
            self._told("dead", self._losses())
            raise
        self._told("ready", f"process {pid}{self._losses()}")
        return rank

    def _lose(self, rank: Rank, why: str) -> None:
        """Once for each process, however many of its episodes tell of it."""
        starting = self._starting
        if starting is None or not starting.done() or starting.exception() or starting.result() is not rank:
            return
        self._starting = None
        self.lost += 1
        rank.kill()
        log.warning("environment worker lost", worker=self.name, episodes=self.episodes, why=why)
        self._told("dead", why)

    def _losses(self) -> str:
        return f", after {self.lost} that were lost" if self.lost else ""
