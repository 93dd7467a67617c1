"""Keeps one engine alive and hands it out: the driver of the engine's health.

Invariants
- `ready` returns an incarnation that answered and is not known to be dead, or raises; it never waits without a
  deadline and a name.
- The source of weights learns of every death before the next start, and of every incarnation before it is handed out.
- A request's final count is read only when its incarnation has finished it or is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from rose.driver.real import RealDriver
from rose.errors import DeadlineExceeded, EngineError, RoseError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.control_client import ControlClient
from rose_executor.engine_health import Died, EngineHealth, GiveUp, HealthEvent, Ready, Start, Wanted
from rose_executor.engine_process import EngineProcess
from rose_executor.token_page import PageReader
from rose_executor.token_route import TokenRoute

log = logger("supervisor")

_COUNT_POLL_S = 0.01
_COUNT_TIMEOUT_S = 10.0


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

    def total_tokens(self) -> int:
        """Tokens generated since this incarnation started."""
        return self.page.total()

    def request_tokens(self, request_id: str) -> int:
        """Tokens generated for one request so far, 0 if it never got any."""
        count = self.page.request(request_id)
        return count.tokens if count is not None else 0

    async def final_request_tokens(self, request_id: str) -> int:
        """As `request_tokens`, once this incarnation has finished the request or is dead."""
        try:
            await self.waits.within(
                self._until_final(request_id), "final count", self.engine_id, _COUNT_TIMEOUT_S, boundary="engine"
            )
        except DeadlineExceeded:
            log.error("count is not final", engine_id=self.engine_id, request_id=request_id)
        return self.request_tokens(request_id)

    async def _until_final(self, request_id: str) -> None:
        while not self.dead.is_set():
            count = self.page.request(request_id)
            if count is not None and count.finished:
                return
            await asyncio.sleep(_COUNT_POLL_S)


class EngineSupervisor:
    """Starts, watches and restarts `process`. `run` must run for anything else to happen.

    `told` is called with a state and a few words whenever something changes; `restarted` with the cause of each death
    that leads to a restart; `silence_s` bounds the time an answer may stay silent.
    """

    def __init__(
        self,
        process: EngineProcess,
        health: EngineHealth,
        session: aiohttp.ClientSession,
        waits: WaitBoard,
        *,
        silence_s: float,
        ready_timeout_s: float,
        told: Callable[[str, str], None],
        restarted: Callable[[str], None],
        joined: Callable[[LiveEngine], None],
    ) -> None:
        self._process = process
        self._health = health
        self._session = session
        self._waits = waits
        self._silence_s = silence_s
        self._ready_timeout_s = ready_timeout_s
        self._told = told
        self._restarted = restarted
        self._joined = joined
        self._live: LiveEngine | None = None
        self._changed = asyncio.Condition()
        self._source: WeightsSource | None = None
        self._lost: str | None = None
        self._stopping = False
        self._cause = ""
        self._driver: RealDriver[HealthEvent, Start | GiveUp] = RealDriver(
            health, self._perform, name="supervisor", waits=waits
        )
