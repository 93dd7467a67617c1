"""Keeps one engine alive and hands it out: the driver of the engine's health.

Invariants
- `ready` returns an incarnation that answered and is not known to be dead, or raises; it never waits without a
  deadline and a name.
- The source of weights learns of every death before the next start, and of every incarnation before it is handed out.
- A request's final count is read only when its incarnation has finished it or is dead; one that does neither in time
  (a hung engine) is ended by force.
- What is reported as a restart is one: a death that no new process follows is not, nor is an end on purpose.
- Why an incarnation was ended is said of that one alone. None that lives is beyond being ended once more.
- A start waits for as long as the disk has no room for its token page, by name: that is no fault of the engine's.
- `stop` may come at any time: whatever is under way ends first, and nothing is said or started after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import aiohttp

from rose.driver.real import RealDriver
from rose.errors import DeadlineExceeded, EngineError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.control_client import ControlClient
from rose_executor.engine_health import (
    Died,
    End,
    EngineHealth,
    GiveUp,
    HealthEvent,
    HeldDown,
    LetUp,
    Ready,
    Start,
    Wanted,
    Watch,
)
from rose_executor.engine_process import EngineProcess
from rose_executor.launcher import LauncherDied
from rose_executor.page_reader import PageReader
from rose_executor.token_page import RequestCount
from rose_executor.token_route import TokenRoute

log = logger("supervisor")

_COUNT_POLL_S = 0.01
COUNT_TIMEOUT_S = 10.0
"""An engine drops a request whose stream was closed within one step; one that has not by then hangs."""
NEWS_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 15.0
_ROOM_AGAIN_S = 1.0
HELD_DOWN = "it was ended on purpose"


class Weights(Protocol):
    """A snapshot folder of one version."""

    @property
    def version(self) -> int: ...
    @property
    def path(self) -> Path: ...


class WeightsSource(Protocol):
    """Says what an engine starts from."""

    async def starting(self, engine_id: str, lost_incarnation: str | None) -> Weights:
        """The weights to load; `lost_incarnation` is the one that died, None at the first start."""
        ...

    async def joined(self, engine_id: str, incarnation: str, version: int) -> None:
        """The new incarnation answers, with `version` loaded whole."""
        ...


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """One incarnation of an engine; its page stays readable after its death."""

    engine_id: str
    incarnation: str
    base_url: str
    route: TokenRoute
    control: ControlClient
    page: PageReader
    dead: asyncio.Event
    waits: WaitBoard
    kill: Callable[[str], None]

    @property
    def lost(self) -> bool:
        """Known to be dead."""
        return self.dead.is_set()

    def total_tokens(self) -> int:
        """Tokens generated since this incarnation started."""
        return self.page.total()

    def request_tokens(self, request_id: str) -> int:
        """Tokens generated for one request so far, 0 if it never got any."""
        count = self.page.request(request_id)
        return count.tokens if count is not None else 0

    async def final_request(self, request_id: str) -> RequestCount:
        """The count of a request once this incarnation has finished it or is dead: nothing is added to it any more.

        Raises DeadlineExceeded if it neither finishes the request nor can be killed.
        """
        try:
            await self.finished(request_id)
        except DeadlineExceeded as late:
            self.kill(f"was silent: {late.what}")
            await self.waits.within(
                self.dead.wait(), "end by force", self.engine_id, _KILL_TIMEOUT_S, boundary="engine"
            )
        count = self.page.request(request_id)
        return RequestCount(0, None, None, True) if count is None else replace(count, finished=True)

    async def finished(self, request_id: str) -> None:
        """Return once this incarnation has finished a request or is dead. Raises DeadlineExceeded."""
        await self.waits.within(
            self._until_final(request_id), "final count", self.engine_id, COUNT_TIMEOUT_S, boundary="engine"
        )

    async def news_of_death(self) -> None:
        """Return once this incarnation is known to be dead, or after a moment: for who has just lost an answer.

        A broken stream is seen before the death that broke it, and asking the dead again would be another loss.
        """
        with contextlib.suppress(DeadlineExceeded):
            await self.waits.within(
                self.dead.wait(), "news of its death", self.engine_id, NEWS_TIMEOUT_S, boundary="engine"
            )

    async def _until_final(self, request_id: str) -> None:
        while not self.dead.is_set():
            count = self.page.request(request_id)
            if count is not None and count.finished:
                return
            await asyncio.sleep(_COUNT_POLL_S)


class EngineSupervisor:
    """Starts, watches and restarts `process`. `run` must run for anything else to happen.

    `told` is called with a state and a few words whenever something changes, `restarts` at each restart with the cause
    of the death before it, `joins` with each new incarnation before anyone else has it. `turn_timeout_s` bounds
    one answer, `ready_timeout_s` how long `ready` waits.
    """

    def __init__(
        self,
        process: EngineProcess,
        health: EngineHealth,
        session: aiohttp.ClientSession,
        waits: WaitBoard,
        *,
        turn_timeout_s: float,
        ready_timeout_s: float,
        told: Callable[[str, str], None],
        restarts: Callable[[str], None],
        joins: Callable[[LiveEngine], None],
    ) -> None:
        self._process = process
        self._health = health
        self._session = session
        self._waits = waits
        self._turn_timeout_s = turn_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._told = told
        self._restarts = restarts
        self._joins = joins
        self._live: LiveEngine | None = None
        self._changed = asyncio.Condition()
        self._source: WeightsSource | None = None
        self._lost: str | None = None
        self._killed_because = ""
        self._unwanted = False
        self._death = ""
        self._restarts_told = 0
        self._stopped = False
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._driver: RealDriver[HealthEvent, Start | Watch | End | GiveUp] = RealDriver(
            health, self._perform, name="supervisor", waits=waits
        )

    @property
    def engine_id(self) -> str:
        return self._process.settings.engine_id

    async def run(self, source: WeightsSource) -> None:
        """Keep the engine alive until `stop`, which may have come before.

        Raises ConfigError or ClusterError if it cannot be started as configured, LauncherDied if nothing can be
        started any more, EngineError if it died too often.
        """
        if self._stopped:
            return
        self._source = source
        self._at_rest.clear()
        try:
            await self._driver.send(Wanted())
            await self._driver.run()
        finally:
            self._at_rest.set()

    async def ready(self) -> LiveEngine:
        """The live incarnation; waits for one that is starting. Raises DeadlineExceeded."""
        live = self._live
        if live is not None and not live.dead.is_set():
            return live
        return await self._waits.within(
            self._until_live(), "engine", self.engine_id, self._ready_timeout_s, boundary="engine"
        )

    async def replace(self, incarnation: str, why: str) -> None:
        """End an incarnation by force if it is still the live one; the next starts from its source's weights."""
        self._kill(incarnation, why)

    async def hold_down(self) -> None:
        """Order that the engine ends, and that none is started until `let_up`; `ready` waits meanwhile.

        That is no death: neither restarts nor their delays know of it. Who has requests on it takes them away first.
        """
        await self._driver.send(HeldDown())

    async def let_up(self) -> None:
        """Order that it is started again."""
        await self._driver.send(LetUp())

    async def stop(self) -> None:
        """Stop watching the engine and end it."""
        self._stopped = True
        self._driver.stop()
        # A start or a death that is half told is seen to its end: else it would find an engine that is there no more.
        with contextlib.suppress(DeadlineExceeded):  # `run` says what does not end
            await self._waits.within(
                self._at_rest.wait(), "end of its supervision", self.engine_id, _STOP_TIMEOUT_S, boundary="engine"
            )
        try:
            await self._process.stop()
        finally:
            # Whoever holds it hears so even where it does not end.
            if self._live is not None:
                self._live.dead.set()
                self._live = None
        self._told("ended", "")

    def _kill(self, incarnation: str, why: str) -> None:
        if not self._process.alive or self._process.incarnation != incarnation:
            return
        if not self._killed_because:
            log.error("engine is ended by force", engine_id=self.engine_id, why=why)
            self._killed_because = why
        # Also the one whose end was ordered before: it may have been frozen anew meanwhile.
        self._process.kill()

    def _end(self) -> None:
        if not self._process.alive:
            # Dead already of something else, or not there yet: a start that is under way need not go on.
            self._unwanted = True
            return
        self._killed_because = self._killed_because or HELD_DOWN
        self._process.kill()

    async def _until_live(self) -> LiveEngine:
        async with self._changed:
            await self._changed.wait_for(lambda: self._live is not None)
        assert self._live is not None
        return self._live

    async def _perform(self, action: Start | Watch | End | GiveUp) -> Sequence[HealthEvent]:
        match action:
            case Start():
                return [await self._start()]
            case Watch():
                return [await self._watch()]
            case End():
                self._end()
                return []
            case GiveUp(why):
                raise EngineError(
                    f"{self.engine_id} is given up after {self._health.restarts} restarts: {why}",
                    to_do=f"see {self._process.settings.log_path}",
                )

    async def _start(self) -> HealthEvent:
        assert self._source is not None
        self._killed_because, self._unwanted = "", False
        weights = await self._source.starting(self.engine_id, self._lost)
        self._lost = None
        await self._until_room()
        if self._unwanted:
            return self._died(HELD_DOWN)
        self._told("starting", f"version {weights.version}")
        try:
            await self._process.start(weights.version, weights.path, self._launched)
        except LauncherDied:
            raise
        except (EngineError, DeadlineExceeded) as error:
            why, self._killed_because = self._killed_because or error.what, ""
            return self._died(why)
        live = self._new_live()
        self._joins(live)
        await self._source.joined(self.engine_id, live.incarnation, weights.version)
        async with self._changed:
            self._live = live
            self._changed.notify_all()
        self._told("ready", live.base_url)
        return Ready()

    async def _until_room(self) -> None:
        """However long the disk has none, unless the engine is not wanted any more."""
        told = ""
        while not self._unwanted and (why := await asyncio.to_thread(self._process.lacks_room)):
            if why != told:
                log.warning("engine is not started yet", engine_id=self.engine_id, why=why)
                self._told("waits", why)
            told = why
            with self._waits.waiting("room for its token page", self.engine_id, _ROOM_AGAIN_S):
                await asyncio.sleep(_ROOM_AGAIN_S)

    def _launched(self) -> None:
        if self._health.restarts > self._restarts_told:
            self._restarts(self._death)
        self._restarts_told = self._health.restarts

    def _new_live(self) -> LiveEngine:
        process = self._process
        route = TokenRoute(
            process.base_url,
            self._session,
            engine_id=self.engine_id,
            waits=self._waits,
            silence_s=self._turn_timeout_s,
            total_s=self._turn_timeout_s,
        )
        return LiveEngine(
            engine_id=self.engine_id,
            incarnation=process.incarnation,
            base_url=process.base_url,
            route=route,
            control=process.control,
            page=process.page,
            dead=asyncio.Event(),
            waits=self._waits,
            kill=partial(self._kill, process.incarnation),
        )

    async def _watch(self) -> HealthEvent:
        await self._process.wait_dead()
        live, self._live = self._live, None
        assert live is not None
        self._lost = live.incarnation
        live.dead.set()
        why, self._killed_because = self._killed_because or self._process.death(), ""
        return self._died(why)

    def _died(self, why: str) -> Died:
        if why != HELD_DOWN:
            self._death = why
        self._told("dead", why)
        return Died(why)
