"""Samples one turn, whatever happens to the engine meanwhile.

Invariants
- Tokens that arrived are kept: after a lost engine, or one that cut its answer off, the turn goes on behind them.
- Every request is booked when it starts and when it ends; a broken one ends with the engine's own count, read from
  its token page, so tokens that never arrived are *unreceived* and not forgotten.
- Every attempt has a deadline; attempts are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import EngineError
from rose.logs import logger
from rose.records import Finish, RequestPart, VersionSpan
from rose.trainer.books import Books
from rose_executor.supervisor import EngineSupervisor, LiveEngine
from rose_executor.token_route import EngineLost, RouteOutput

log = logger("sampler")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample: `temperature` 0 is greedy; `max_new_tokens` bounds one turn, `attempts_max` its engines.

    No seed: vLLM 0.32 on CPU dies of a seeded request whose prompt is computed in pieces.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    attempts_max: int


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
    """Samples turns on the supervised engine."""

    def __init__(self, supervisor: EngineSupervisor, books: Books, settings: SamplingSettings) -> None:
        self._supervisor = supervisor
        self._books = books
        self.settings = settings

    async def sample(self, trajectory_id: str, turn_index: int, token_ids: list[int]) -> SampledTurn:
        """Continue `token_ids` by one turn.

        Raises EngineError if the engine refuses the request, or was lost `attempts_max` times.
        """
        turn = SampledTurn([], [], [], [])
        for attempt in range(self.settings.attempts_max):
            engine = await self._supervisor.ready()
            request_id = f"{trajectory_id}.{turn_index}.{attempt}"
            self._books.start_request(request_id, trajectory_id, engine)
            try:
                part = await self._request(engine, request_id, token_ids, turn)
            except EngineLost as lost:
                part = await self._partial(engine, request_id, lost)
                log.info("turn resumes", request_id=request_id, kept_tokens=len(part.output_ids), why=lost.what)
                await engine.news_of_death()
            except EngineError:
                # A request that was refused is not on the page, and waiting would not bring it there.
                began = engine.request_tokens(request_id) > 0
                self._books.end_request(request_id, 0, await engine.final_request_tokens(request_id) if began else 0)
                raise
            else:
                self._books.end_request(request_id, len(part.output_ids))
            turn.extend(engine.engine_id, request_id, part)
            turn.finish = self._finish(turn, part.finish)
            if turn.finish is not Finish.ABORT:
                return turn
        raise EngineError(
            f"turn {turn_index} of {trajectory_id} was lost {self.settings.attempts_max} times",
            expected="one of the attempts to finish",
            to_do="see the engine's log for why it dies",
        )

    async def _request(
        self, engine: LiveEngine, request_id: str, token_ids: list[int], turn: SampledTurn
    ) -> RouteOutput:
        return await engine.route.generate(
            request_id,
            [*token_ids, *turn.output_ids],
            max_tokens=self.settings.max_new_tokens - len(turn.output_ids),
            temperature=self.settings.temperature,
            stop_token_ids=self.settings.stop_token_ids,
        )

    async def _partial(self, engine: LiveEngine, request_id: str, lost: EngineLost) -> RouteOutput:
        """What arrived before the stream broke; raises EngineError if it cannot be stamped with one version."""
        generated = await engine.final_request_tokens(request_id)
        partial = lost.partial
        self._books.end_request(request_id, len(partial.output_ids), generated)
        if partial.versions is None:
            raise EngineError(
                f"{len(partial.output_ids)} tokens of {request_id} cannot be stamped with a version",
                expected="a broken stream to lie within one version",
            ) from lost
        return RouteOutput(partial.output_ids, partial.logprobs, partial.versions, Finish.ABORT, ())

    def _finish(self, turn: SampledTurn, reported: Finish) -> Finish:
        """How the turn ended; ABORT if it has to go on, which a broken stream cannot know that it need not."""
        if reported is not Finish.ABORT:
            return reported
        if turn.output_ids and turn.output_ids[-1] in self.settings.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(turn.output_ids) >= self.settings.max_new_tokens else Finish.ABORT
