"""Drives an open loop against a serving engine's OpenAI `/v1/completions`, and measures what its users would see.

Invariants
- The core decides when; here requests are only sent, timed and recorded. Each that was due has one record.
- Times are taken when bytes reach this process. How long the process itself stood still is measured beside them.
- Every request has a deadline; its tokens up to there are kept.
- Needs nothing of ROSE in the engine: any server with vLLM's streamed completions and running usage will do.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from rose.driver.real import RealDriver
from rose.waits import WaitBoard
from rose.workload.completion_stream import CompletionStream, StreamBroken
from rose.workload.load_record import LoadRecord, Outcome
from rose.workload.open_loop import (
    Begin,
    Cut,
    Ended,
    Finish,
    LoopAction,
    LoopCounts,
    LoopEvent,
    OpenLoop,
    Refuse,
    Send,
    Stop,
)
from rose.workload.prompts import Prompts
from rose.workload.trace import Trace

_BEAT_S = 0.05
_BODIES_AHEAD = 64
_CONNECT_TIMEOUT_S = 10.0
# The server closes a connection that was idle for 5 s; using one at that moment would look like a broken stream.
_KEEP_ALIVE_S = 2.0
_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """`url` is the engine's base address. `deadline_s` bounds one request, from sending to its end.

    `prefix` and its index make a request's id in the engine's logs: no two clients of one engine may share it.
    """

    url: str
    model: str
    prefix: str = "load"
    in_flight_max: int = 256
    deadline_s: float = 120.0


@dataclass(slots=True)
class _Answer:
    """What has arrived of one request. Times in seconds since the beginning."""

    sent_s: float
    stream: CompletionStream
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    loop_lag_s: float = 0.0

    def arrived(self, data: bytes, at_s: float) -> None:
        before = self.stream.tokens
        try:
            self.stream.feed(data)
        finally:
            # What broke the stream may have come in one piece with tokens.
            if self.stream.tokens > before:
                self._stamp(at_s)

    def _stamp(self, at_s: float) -> None:
        if self.last_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_s)
        self.last_s = at_s


class LoadClient:
    """One replay of `trace`; `run` it once. `record` is given each request as it ends, and must not wait."""

    def __init__(
        self,
        settings: LoadSettings,
        trace: Trace,
        prompts: Prompts,
        *,
        record: Callable[[LoadRecord], None],
        beat: Callable[[float], None] = lambda lag_s: None,
        waits: WaitBoard | None = None,
    ) -> None:
        """`beat` is told, some twenty times a second, how long the client has just stood still."""
        self._settings = settings
        self._url = f"{settings.url}/v1/completions"
        self._trace = trace
        self._prompts = prompts
        self._record = record
        self._beat = beat
        self._waits = waits if waits is not None else WaitBoard()
        self._loop = OpenLoop([request.arrival_s for request in trace.requests], settings.in_flight_max)
        self._driver: RealDriver[LoopEvent, LoopAction] = RealDriver(
            self._loop, self._perform, name="load client", waits=self._waits
        )
        self._limits: dict[int, asyncio.Timeout] = {}
        self._answers: dict[int, _Answer] = {}
        self._cut: set[int] = set()
        self._bodies: dict[int, bytes] = {}
        self._beat_due = math.inf
        self._session: aiohttp.ClientSession | None = None

    @property
    def counts(self) -> LoopCounts:
        return self._loop.counts

    @property
    def in_flight(self) -> int:
        return self._loop.in_flight

    async def run(self) -> None:
        """Replay to the end, or until `stop`, and return when every request has its record."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            beside = [asyncio.create_task(self._keep_beat()), asyncio.create_task(self._keep_bodies())]
            try:
                await self._driver.send(Begin())
                await self._driver.run()
            finally:
                for task in beside:
                    task.cancel()
                ends = await asyncio.gather(*beside, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    async def stop(self) -> None:
        """Send no more, cut what is in flight, and let `run` return. Does nothing once it has finished."""
        if not self._loop.finished:
            await self._driver.send(Stop())

    async def _perform(self, action: LoopAction) -> Sequence[LoopEvent]:
        match action:
            case Send(index, due_s):
                record = await self._ask(index, due_s)
                self._record(record)
                return [Ended(index, record.lag_s or 0.0)]
            case Refuse(index, due_s):
                self._bodies.pop(index, None)
                self._record(self._made(index, due_s, Outcome.OVER_CAP, None, ""))
            case Cut(indices):
                self._cut.update(indices)
                for index in indices:
                    if index in self._limits and not self._limits[index].expired():
                        self._limits[index].reschedule(asyncio.get_running_loop().time())
            case Finish():
                self._driver.stop()
        return []

    async def _ask(self, index: int, due_s: float) -> LoadRecord:
        body = self._bodies.pop(index, None) or self._body(index)
        asked = self._trace.requests[index].output_tokens
        answer = self._answers[index] = _Answer(self._now_s(), CompletionStream(asked))
        try:
            with self._waits.waiting(f"answer to request {index}", self._settings.url, self._settings.deadline_s):
                async with asyncio.timeout(0.0 if index in self._cut else self._settings.deadline_s) as limit:
                    self._limits[index] = limit
                    outcome, detail = await self._stream(index, body, answer)
        except TimeoutError:
            # Also aiohttp's own, of a connection; ours has then not expired.
            outcome, detail = (Outcome.TIMED_OUT, "") if limit.expired() else (Outcome.BROKEN, "no connection in time")
            if index in self._cut:
                outcome = Outcome.CUT
        finally:
            answer.loop_lag_s = max(answer.loop_lag_s, self._lag_s())
            del self._answers[index]
            self._limits.pop(index, None)
        return self._made(index, due_s, outcome, answer, detail)

    async def _stream(self, index: int, body: bytes, answer: _Answer) -> tuple[Outcome, str]:
        assert self._session is not None
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{self._settings.prefix}-{index}"}
        try:
            answer.sent_s = self._now_s()
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    text = (await response.content.read(4 * _DETAIL_CHARS)).decode(errors="replace")
                    return Outcome.REFUSED, f"status {response.status}: {text}"
                async for data in response.content.iter_any():
                    answer.arrived(data, self._now_s())
        except StreamBroken as error:
            return Outcome.BROKEN, str(error)
        except (aiohttp.ClientError, OSError, UnicodeError) as error:  # the last is of names that no resolver takes
            if isinstance(error, TimeoutError):
                raise
            return Outcome.BROKEN, f"{type(error).__name__}: {error}"
        return self._judged(index, answer.stream)

    def _judged(self, index: int, stream: CompletionStream) -> tuple[Outcome, str]:
        asked = self._trace.requests[index].output_tokens
        if not stream.whole:
            return Outcome.BROKEN, f"the stream ended after {stream.tokens} tokens, before its end marker"
        if stream.tokens != asked:
            return Outcome.BROKEN, f"{stream.tokens} of {asked} tokens, then {stream.finish_reason}"
        return Outcome.COMPLETED, ""

    def _made(self, index: int, due_s: float, outcome: Outcome, answer: _Answer | None, detail: str) -> LoadRecord:
        request = self._trace.requests[index]
        return LoadRecord(
            index,
            outcome,
            due_s=due_s,
            ended_s=self._now_s(),
            prompt_tokens=request.prompt_tokens,
            asked_tokens=request.output_tokens,
            tokens=0 if answer is None else answer.stream.tokens,
            sent_s=None if answer is None else answer.sent_s,
            first_s=None if answer is None else answer.first_s,
            last_s=None if answer is None else answer.last_s,
            gaps_s=() if answer is None else tuple(answer.gaps_s),
            loop_lag_s=0.0 if answer is None else answer.loop_lag_s,
            detail=detail[:_DETAIL_CHARS],
        )

    @property
    def began_at_s(self) -> float | None:
        """Second 0 of every record, on the machine's monotonic clock; None before the replay has begun."""
        return self._loop.begin

    def _now_s(self) -> float:
        assert self._loop.begin is not None
        return time.monotonic() - self._loop.begin

    def _body(self, index: int) -> bytes:
        body = {
            "model": self._settings.model,
            "prompt": self._prompts.token_ids(index),
            "max_tokens": self._trace.requests[index].output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return json.dumps(body, separators=(",", ":")).encode()

    async def _keep_bodies(self) -> None:
        """Make bodies before they are due, one at a time, so that a long prompt holds up no measurement."""
        for index in range(len(self._trace.requests)):
            while len(self._bodies) >= _BODIES_AHEAD:
                await asyncio.sleep(_BEAT_S)
            counts = self._loop.counts
            if index >= counts.sent + counts.refused:
                self._bodies[index] = self._body(index)
            await asyncio.sleep(0)

    async def _keep_beat(self) -> None:
        while True:
            self._beat_due = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            lag_s = self._lag_s()
            for answer in self._answers.values():
                answer.loop_lag_s = max(answer.loop_lag_s, lag_s)
            self._beat(lag_s)

    def _lag_s(self) -> float:
        """How long this process has stood still, if it just did."""
        return max(0.0, time.monotonic() - self._beat_due)
