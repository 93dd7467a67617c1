"""Samples one turn, whatever happens to the engine meanwhile.

Invariants
- Tokens that arrived are kept: after a lost engine, or one that cut its answer off, the turn goes on behind them, on
  whichever engine has room, but not on a lent one that it was lost on. Kept are only those tokens that the engine's own
  count stamps with one version.
- Every request is booked when it starts and when it ends; a broken one ends with the engine's own count, so tokens
  that never arrived, or that nobody can stamp, are *unreceived* and not forgotten.
- The engine keeps the prefix of a trajectory that comes back for another turn: of groups that opened earlier longest.
- Every attempt has a lease and a deadline. Those on the run's own engines are bounded; each lent incarnation gets one,
  and what lent engines lose counts for nothing: they may come and go as they like.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rose.errors import EngineError
from rose.logs import logger
from rose.records import Finish, RequestPart, VersionSpan
from rose.trainer.books import Books
from rose.trainer.engines import Engines
from rose.trainer.left_behind import LeftBehind
from rose.trainer.turn_engine import TurnEngine
from rose_executor.keep_prefix import Keep
from rose_executor.token_page import RequestCount
from rose_executor.token_route import EngineLost, RouteOutput
from rose_scheduler.client import Lease, SchedulerClient, Turn
from rose_scheduler.events import LeaseOutcome

log = logger("sampler")

_MOMENT_S = 0.5
_KEEP_S = 600.0
"""For longer than that no environment is waited for without its prefix being somebody else's memory."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample: `temperature` 0 is greedy; `max_new_tokens` bounds one turn.

    It is given up when the run's own engines have lost it `attempts_max` times.
    An attempt waits at most `lease_wait_s` for its engine, and may hold it for `lease_hold_s`.
    No seed: vLLM 0.32 on CPU dies of a seeded request whose prompt is computed in pieces.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    attempts_max: int
    lease_wait_s: float
    lease_hold_s: float


@dataclass(slots=True)
class SampledTurn:
    """What one turn has received so far; lengths of `output_ids` and `logprobs` agree, `versions` tile them."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    requests: list[RequestPart]
    finish: Finish = Finish.ABORT

    def extend(self, engine_id: str, request_id: str, part: RouteOutput) -> None:
        at = len(self.output_ids)
        self.output_ids.extend(part.output_ids)
        self.logprobs.extend(part.logprobs)
        for span in part.versions:
            self._append_span(VersionSpan(span.version, span.start + at, span.end + at))
        self.requests.append(RequestPart(engine_id, request_id, len(part.output_ids)))

    def _append_span(self, span: VersionSpan) -> None:
        last = self.versions[-1] if self.versions else None
        if last is not None and last.version == span.version:
            self.versions[-1] = VersionSpan(last.version, last.start, span.end)
        else:
            self.versions.append(span)


class TurnSampler:
    """Samples turns on leases: each attempt on the engine that the scheduler names."""

    def __init__(self, scheduler: SchedulerClient, engines: Engines, books: Books, settings: SamplingSettings) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._books = books
        self.settings = settings
        self._left_behind = LeftBehind()

    async def over(self, trajectory_id: str) -> None:
        """It takes no more turns: the scheduler is told, and the engine that keeps its prefix with its next request."""
        self._left_behind.over(trajectory_id)
        await self._scheduler.over(trajectory_id)

    async def sample(self, asked: Turn, token_ids: list[int], *, last: bool = False) -> SampledTurn:
        """Continue `token_ids` by one turn, for which `asked` is leased; the trajectory's `last`, if that is known.

        Raises EngineError if an engine refuses the request, or the run's own lost the turn `attempts_max` times;
        SchedulerError if a lease is refused, DeadlineExceeded if there is none in time.
        """
        turn, left, own_losses = SampledTurn([], [], [], []), list[str](), 0
        for attempt in itertools.count():
            request_id = f"{asked.trajectory_id}.{asked.number}.{attempt}"
            prompt = [*token_ids, *turn.output_ids]
            asked_s = time.monotonic()
            place = self._place(replace(asked, context_tokens=len(prompt), avoid=tuple(left)))
            async with place as (engine, lease):
                leased_s = time.monotonic()
                self._books.start_request(request_id, asked.trajectory_id, engine)
                keep = self._keep(engine, lease, "" if last else asked.trajectory_id)
                part = await self._attempt(engine, lease, request_id, prompt, len(turn.output_ids), keep)
            if lease.counts_address:
                left.append(engine.incarnation)
            turn.extend(engine.engine_id, request_id, part)
            turn.finish = self._finish(turn, part.finish)
            log.info(
                "turn sampled",
                request_id=request_id,
                engine_id=engine.engine_id,
                lease_id=lease.lease_id,
                tokens=len(part.output_ids),
                versions=[span.version for span in part.versions],
                finish=turn.finish,
                waited_s=round(leased_s - asked_s, 3),
                seconds=round(time.monotonic() - leased_s, 3),
            )
            if turn.finish is not Finish.ABORT:
                return turn
            own_losses += not lease.counts_address
            if own_losses >= self.settings.attempts_max:
                break
        raise EngineError(
            f"turn {asked.number} of {asked.trajectory_id} was lost {self.settings.attempts_max} times",
            expected="one of the attempts to finish",
            to_do="see the engine's log for why it dies",
        )

    @asynccontextmanager
    async def _place(self, asked: Turn) -> AsyncIterator[tuple[TurnEngine, Lease]]:
        """A lease, and the engine behind it: not one that is known here to be lost, which the scheduler then avoids."""
        until_s = time.monotonic() + self.settings.lease_wait_s
        while True:
            left_s = max(_MOMENT_S, until_s - time.monotonic())
            async with self._scheduler.lease(asked, wait_s=left_s, hold_s=self.settings.lease_hold_s) as lease:
                engine = await self._engines.behind(lease)
                if not engine.lost:
                    yield engine, lease
                    return
                lease.outcome = LeaseOutcome.FAILED
            asked = replace(asked, avoid=(*asked.avoid, engine.incarnation))

    def _keep(self, engine: TurnEngine, lease: Lease, trajectory_id: str) -> Keep:
        forget = self._left_behind.on(engine.incarnation, trajectory_id)
        return Keep(trajectory_id, lease.keep_rank, _KEEP_S, forget)

    async def _attempt(
        self, engine: TurnEngine, lease: Lease, request_id: str, prompt: list[int], kept_tokens: int, keep: Keep
    ) -> RouteOutput:
        try:
            part = await engine.route.generate(
                request_id,
                prompt,
                max_tokens=self.settings.max_new_tokens - kept_tokens,
                temperature=self.settings.temperature,
                stop_token_ids=self.settings.stop_token_ids,
                keep=keep,
            )
        except EngineLost as lost:
            lease.outcome = LeaseOutcome.FAILED
            part = await self._kept(engine, request_id, lost)
            await engine.news_of_death()
        except EngineError:
            # A request that was refused is not on the page, and waiting would not bring it there.
            count = await engine.final_request(request_id) if engine.request_tokens(request_id) else None
            self._books.end_request(request_id, 0, count.tokens if count is not None else 0)
            raise
        else:
            self._books.end_request(request_id, len(part.output_ids))
            if part.finish is Finish.ABORT:
                lease.outcome = LeaseOutcome.CUT
        lease.tokens = len(part.output_ids)
        return part

    async def _kept(self, engine: TurnEngine, request_id: str, lost: EngineLost) -> RouteOutput:
        """What arrived before the stream broke, if the engine's own count stamps it with one version; else nothing."""
        partial, count = lost.partial, await engine.final_request(request_id)
        arrived = len(partial.output_ids)
        versions = vouched(count, arrived)
        received = 0 if versions is None else arrived
        generated = arrived if count is None else max(count.tokens, received)
        if count is not None and count.finished:
            self._books.end_request(request_id, received, count.tokens)
        else:
            self._books.end_unsure(request_id, received, generated)
        log.info(
            "turn resumes",
            request_id=request_id,
            engine_id=engine.engine_id,
            kept_tokens=received,
            thrown_away_tokens=arrived - received,
            why=lost.what,
        )
        if versions is None:
            return RouteOutput((), (), (), Finish.ABORT, ())
        return RouteOutput(partial.output_ids, partial.logprobs, versions, Finish.ABORT, ())

    def _finish(self, turn: SampledTurn, reported: Finish) -> Finish:
        """How the turn ended; ABORT if it has to go on, which a broken stream cannot know that it need not."""
        if reported is not Finish.ABORT:
            return reported
        if turn.output_ids and turn.output_ids[-1] in self.settings.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(turn.output_ids) >= self.settings.max_new_tokens else Finish.ABORT


def vouched(count: RequestCount | None, tokens: int) -> tuple[VersionSpan, ...] | None:
    """The version of the first `tokens` of a request, None if its count does not say that there is one for all."""
    if tokens == 0:
        return ()
    if count is None or count.tokens < tokens or count.first_version is None:
        return None
    if count.first_version != count.last_version:
        return None
    return (VersionSpan(count.first_version, 0, tokens),)
