"""One process that plays episodes, seen from the run; a new one takes its place when it is lost.

Invariants
- A worker that dies, or answers nothing at all any more, costs the episodes that it had open, each of which fails as an
  environment does. The next episode gets a new process.
- Of several episodes that wait for the new process, one starts it. Where it does not start, other workers are taken for
  a while: one that fails at once has the fewest episodes of all.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from rose.config import EnvironmentConfig
from rose.errors import ClusterError, DeadlineExceeded, EnvironmentFailed, RoseError
from rose.logs import logger
from rose.trainer.environment_rank import answering_environment
from rose.trainer.line import Line
from rose.trainer.rank import Rank
from rose.waits import WaitBoard

log = logger("environment")

PATIENCE_S = 30.0
"""How much later than its deadline a worker may answer: on a full machine it gets few turns."""
TRY_AGAIN_S = 60.0
"""How long a worker that did not start is left alone, if there are others."""
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
        waits: WaitBoard,
        told: Callable[[str, str], None],
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self.episodes = 0
        self.lost = 0
        self._make = make
        self._config = config
        self._waits = waits
        self._told = told
        self._start_timeout_s = start_timeout_s
        self._starting: asyncio.Task[Line] | None = None
        self._failed_s = -math.inf

    @property
    def fit(self) -> bool:
        """Whether an episode that may go elsewhere should be given to it."""
        return time.monotonic() - self._failed_s >= TRY_AGAIN_S

    async def start(self) -> None:
        """Raises ConfigError if the environment cannot be loaded there, ClusterError or DeadlineExceeded."""
        await self._live()

    async def ready(self, whom: str) -> Line:
        """The process that lives now, a new one if the last was lost. Raises EnvironmentFailed if none starts."""
        try:
            return await self._live()
        except RoseError as error:
            raise EnvironmentFailed(f"{whom}: {self.name} does not start: {error.what}", to_do=error.to_do) from error

    async def call(self, line: Line, method: str, *arguments: Any, what: str, whom: str, timeout_s: float) -> Any:
        """What a method of the worker's `EnvironmentRank` returns. Whatever goes wrong raises EnvironmentFailed."""
        if (death := line.rank.death) is not None:
            self._lose(line, death.what)
            raise EnvironmentFailed(f"{whom}: {death.what}", to_do=death.to_do)
        answer = line.call(method, *arguments)
        try:
            return await self._waits.within(answer, what, whom, timeout_s + PATIENCE_S, boundary="environment")
        except (ClusterError, DeadlineExceeded) as error:
            if line.rank.death is not None or (isinstance(error, DeadlineExceeded) and error.boundary == "cluster"):
                self._lose(line, error.what)
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
            line = starting.result()
            closing = line.call("end")
            try:
                await self._waits.within(closing, "end of its episodes", self.name, END_TIMEOUT_S, boundary="cluster")
            except RoseError as error:
                log.warning("episodes are not closed", why=error.what)
            finally:
                line.rank.kill()
                await line.close()
        self._told("ended", "")

    async def _live(self) -> Line:
        self._lose_the_dead()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except RoseError:
            if self._starting is starting:
                self._starting, self._failed_s = None, time.monotonic()
            raise

    def _lose_the_dead(self) -> None:
        """It may have died when none of its episodes was there to tell."""
        if (line := self._started()) is not None and (death := line.rank.death) is not None:
            self._lose(line, death.what)

    def _started(self) -> Line | None:
        """The process that was started last, if it did start."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception():
            return None
        return starting.result()

    async def _start(self) -> Line:
        self._told("starting", self._losses())
        rank = self._make()
        try:
            path, timeout_s = list(sys.path), self._start_timeout_s
            pid = await rank.start(answering_environment, self._config, path, timeout_s=timeout_s)
        except BaseException:
            rank.kill()
            self._told("dead", self._losses())
            raise
        self._told("ready", f"process {pid}{self._losses()}")
        return Line(rank, PATIENCE_S)

    def _lose(self, line: Line, why: str) -> None:
        """Once for each process, however many of its episodes tell of it."""
        if self._started() is not line:
            return
        self._starting = None
        self.lost += 1
        line.rank.kill()
        log.warning("environment worker lost", worker=self.name, episodes=self.episodes, why=why)
        self._told("dead", why)

    def _losses(self) -> str:
        return f", after {self.lost} that were lost" if self.lost else ""
