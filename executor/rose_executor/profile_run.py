"""Has a real engine do what a plan says, and gathers the steps that it made.

Invariants
- The engine is started and spoken to as any other; only its scheduler also writes down its steps.
- Whatever ends it, nothing of the engine is left.
- The plan is followed in its order, until it is done or the time is over; never less than one load.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from rose.errors import EngineError
from rose.waits import WaitBoard
from rose_executor.engine_process import EngineProcess
from rose_executor.profile_plan import Load
from rose_executor.step_log import SeenStep, read_steps
from rose_executor.token_route import TokenRoute, open_session


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `planned` loads are done; `left_s` is what is left of the time."""

    done: int
    planned: int
    left_s: float


async def record_steps(
    process: EngineProcess,
    warm: Sequence[Load],
    loads: Sequence[Load],
    waits: WaitBoard,
    *,
    seconds: float,
    told: Callable[[Progress], None],
) -> list[SeenStep]:
    """The steps of an engine under `loads`, for at most so many seconds after `warm`, and what is then under way.

    `process` has a `step_log` and is not started; it is ended afterwards. The steps of `warm`, which come first, do not
    count: the first requests pay for what an engine makes at its first use.

    Raises as `EngineProcess.start`, EngineError or EngineLost if the engine refuses a request or dies.
    """
    log = process.settings.step_log
    if log is None:
        raise EngineError(f"{process.settings.engine_id} does not write down its steps", expected="a step_log")
    try:
        await process.start(0)
        async with open_session() as session:
            driver = _Driver(process, session, waits)
            for load in warm:
                await driver.do(load)
            warm_steps = len(read_steps(log))
            until_s = time.monotonic() + seconds
            for done, load in enumerate(loads):
                told(Progress(done, len(loads), until_s - time.monotonic()))
                await driver.do(load)
                if time.monotonic() >= until_s:
                    break
        return read_steps(log, warm_steps)
    finally:
        await process.stop()


class _Driver:
    def __init__(self, process: EngineProcess, session: aiohttp.ClientSession, waits: WaitBoard) -> None:
        self._route = TokenRoute(process.base_url, session, engine_id=process.settings.engine_id, waits=waits)
        self._numbers = itertools.count()

    async def do(self, load: Load) -> None:
        """All requests of a load at once, each to its end; the first that fails ends the others."""
        requests = [asyncio.create_task(self._one(prompt, load.output_tokens)) for prompt in load.prompts]
        try:
            await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _one(self, prompt: Sequence[int], output_tokens: int) -> None:
        await self._route.generate(
            f"profile-{next(self._numbers)}", prompt, max_tokens=output_tokens, temperature=1.0, stop_token_ids=()
        )
