"""Asks each incarnation of a guest the question whose answer is known, before anybody samples on it.

Invariants
- The question takes the ordinary way, and waits for the gate as any request does. A gate that is shut is no failure:
  only seconds in which it was open count against the deadline.
- What is wrong ends the incarnation; `WRONG_MAX` wrong ones in a row end the executor: another would be no better.
- A version that nobody upstream knows an answer of is run all the same, and named: weights may come from an older run,
  or from a trainer of one's own that is asked nothing.
- What a guest generated before it was offered is set apart: it is nobody's who samples on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from rose.errors import ClusterError, ContractError, DeadlineExceeded, EngineError, TransferError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.known_answers import TOLERANCE_NATS, Comparison, compare
from rose_executor.supervisor import LiveEngine
from rose_executor.token_route import EngineLost, RouteOutput
from rose_transfer.distribution import Offer, Receiver
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.store.canonical import MalformedRecord
from rose_transfer.transport.interface import Refused

log = logger("guest")

OPEN_S = 300.0
"""The question is 40 tokens long, and its answer 8; but a guest gets what others leave of its cores."""
WRONG_MAX = 3
_FETCH_S = 30.0
_AGAIN_S = 1.0
_LOOK_S = 0.05


class WrongAnswer(EngineError):
    """The engine runs, and computes something else than its version."""


class GuestProof:
    """Of one guest, for all of its lives. `words` are a state and a few words on what was found last.

    `dtype` is the arithmetic of the guest, which takes sequences of `max_model_len` tokens. `open_s` are the seconds
    for which its gate was open so far. `told_wrong` hears of each wrong answer; `set_apart` of each incarnation that
    may be offered, and raises what stands in the way.
    """

    def __init__(
        self,
        dtype: str,
        max_model_len: int,
        waits: WaitBoard,
        *,
        open_s: Callable[[], float],
        told_wrong: Callable[[], None],
        set_apart: Callable[[str], None],
    ) -> None:
        self.words = ("none yet", "")
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._waits = waits
        self._open_s = open_s
        self._told_wrong = told_wrong
        self._set_apart = set_apart
        self._wrong = 0

    async def prove(self, live: LiveEngine, receiver: Receiver, runs: Offer) -> None:
        """Return once this incarnation may be offered. It must run that version all the while.

        Raises EngineError if it has to be replaced, ContractError if the next one would be no better; Refused.
        """
        self.words = ("asks", f"version {runs.version}")
        answer, unknown = await self._known(receiver, runs)
        if answer is None:
            self.words = ("unproven", f"version {runs.version}: {unknown}")
            log.warning(
                "the guest is offered unproven", incarnation=live.incarnation, version=runs.version, why=unknown
            )
        else:
            await self._check(live, answer, runs)
        await self._keep_apart(live.incarnation)

    async def _keep_apart(self, incarnation: str) -> None:
        """However long the disk has no room: that is no fault of the guest's."""
        proven = self.words
        while True:
            try:
                self._set_apart(incarnation)
            except ClusterError as error:
                if self.words[0] != "waits":
                    log.warning("the guest is not offered yet", incarnation=incarnation, why=str(error))
                self.words = ("waits", str(error))
                with self._waits.waiting("room for its counts", "guest", _AGAIN_S):
                    await asyncio.sleep(_AGAIN_S)
            else:
                self.words = proven
                return

    async def _known(self, receiver: Receiver, runs: Offer) -> tuple[KnownAnswer | None, str]:
        """The answer of a version, or why there is none. However long who knows is away."""
        while True:
            try:
                answer = await receiver.answer(runs, deadline_s=_FETCH_S)
            except Refused:
                raise
            except MalformedRecord as error:
                return None, error.what
            except (TransferError, DeadlineExceeded) as error:
                log.warning("the known answer is asked for again", version=runs.version, why=str(error))
                with self._waits.waiting("another attempt at the known answer", "publisher", _AGAIN_S):
                    await asyncio.sleep(_AGAIN_S)
                continue
            if answer is None:
                return None, "nobody upstream tells what it must answer"
            if answer.tokens > self._max_model_len:
                return (
                    None,
                    f"the question takes {answer.tokens} tokens, and guest.max_model_len is {self._max_model_len}",
                )
            return answer, ""

    async def _check(self, live: LiveEngine, answer: KnownAnswer, runs: Offer) -> None:
        try:
            output = await self._ask(live, answer)
            if {span.version for span in output.versions} != {runs.version}:
                raise EngineError(
                    f"{live.engine_id} answered under {output.versions}", expected=f"version {runs.version} alone"
                )
            found = compare(answer, output.output_ids, output.top, self._dtype)
            if not found.agrees:
                raise WrongAnswer(f"{live.engine_id} answers version {runs.version}'s known question wrongly: {found}")
        except WrongAnswer as error:
            self._count(error, live, runs)
            raise
        self._passed(live, found, runs)

    def _passed(self, live: LiveEngine, found: Comparison, runs: Offer) -> None:
        self._wrong = 0
        self.words = ("proven", f"version {runs.version}, at the guest's start: {found}")
        log.info(
            "the guest answers as it must",
            incarnation=live.incarnation,
            version=runs.version,
            difference=found.difference,
            places=found.places,
        )

    def _count(self, error: WrongAnswer, live: LiveEngine, runs: Offer) -> None:
        """Raises ContractError for one too many."""
        self._wrong += 1
        self._told_wrong()
        self.words = ("wrong", f"{error.what}; {self._wrong} in a row")
        log.error("the guest answers wrongly", incarnation=live.incarnation, in_a_row=self._wrong, why=error.what)
        if self._wrong >= WRONG_MAX:
            raise ContractError(
                f"{error.what}; so did {WRONG_MAX} guests in a row",
                expected=f"what the trainer of version {runs.version} computed, within"
                f" {TOLERANCE_NATS[self._dtype]:g} nats in {self._dtype}",
                to_do="compare guest.model with the run's base model, and vLLM and its kernels here with the run's own",
            ) from error

    async def _ask(self, live: LiveEngine, answer: KnownAnswer) -> RouteOutput:
        """Raises WrongAnswer for log-probs that are none, EngineError if no answer comes."""
        opened_s, attempt = self._open_s(), 0
        while True:
            attempt += 1
            try:
                return await self._asked_once(live, answer, f"known-{live.incarnation}-{attempt}", opened_s + OPEN_S)
            except EngineLost as lost:
                if isinstance(lost.__cause__, TimeoutError):
                    continue  # the gate may be shut for longer than any request may take
                if isinstance(lost.__cause__, aiohttp.ClientError | OSError):
                    await live.news_of_death()
                    raise
                raise WrongAnswer(f"{live.engine_id} answers no log-probs: {lost.what}") from lost

    async def _asked_once(
        self, live: LiveEngine, answer: KnownAnswer, request_id: str, until_open_s: float
    ) -> RouteOutput:
        asking = asyncio.create_task(
            live.route.generate(
                request_id,
                answer.question,
                max_tokens=len(answer.output),
                temperature=0.0,
                stop_token_ids=(),
                top_logprobs=max(map(len, answer.likely)),
            )
        )
        try:
            while (left_s := until_open_s - self._open_s()) > 0:
                with self._waits.waiting("answer to the known question", live.engine_id, left_s):
                    await asyncio.wait({asking}, timeout=max(left_s, _LOOK_S))
                if asking.done():
                    return asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        raise EngineError(
            f"{live.engine_id} did not answer the known question",
            expected=f"an answer of {len(answer.output)} tokens after {OPEN_S:g} s in which its gate was open",
            to_do="see the guest's log",
        )
