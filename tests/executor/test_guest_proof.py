"""A guest is asked what its version must answer: what passes, what ends it, and what only takes its time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ClusterError, ContractError, DeadlineExceeded, EngineError, TransferError
from rose.records import Finish, VersionSpan
from rose.waits import WaitBoard
from rose_executor import guest_proof
from rose_executor.guest_proof import WRONG_MAX, GuestProof, WrongAnswer
from rose_executor.token_route import EngineLost, PartialOutput, RouteOutput
from rose_transfer.distribution import Offer
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.store.canonical import MalformedRecord
from rose_transfer.transport.interface import Refused

LONG_S = 30.0
ANSWER = KnownAnswer((5, 6), (1, 2), ({1: -0.5, 3: -2.0}, {2: -0.25, 4: -3.0}))
RUNS = Offer(7, "ab" * 32)
RIGHT = RouteOutput((1, 2), (-0.5, -0.25), (VersionSpan(7, 0, 2),), Finish.LENGTH, ANSWER.likely)
WRONG = RouteOutput(
    (1, 2), (-0.5, -0.25), (VersionSpan(7, 0, 2),), Finish.LENGTH, ({1: -0.5, 3: -2.0}, {2: -0.5, 4: -3.0})
)


def in_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own, for a while at most."""

    @wraps(test)
    def run(**given: object) -> None:
        asyncio.run(asyncio.wait_for(test(**given), LONG_S))

    return run


def lost(cause: BaseException | None) -> EngineLost:
    error = EngineLost("the guest was lost: log-probs [nan]", PartialOutput("r", (), ()))
    error.__cause__ = cause
    return error


class Scene:
    """A guest that answers as it is told, one reply after the other, the last one for ever."""

    def __init__(self, *replies: RouteOutput | Exception | None, max_model_len: int = 64) -> None:
        self.replies: Iterator[RouteOutput | Exception | None] = itertools.chain(replies, itertools.repeat(replies[-1]))
        self.known: list[KnownAnswer | Exception | None] = [ANSWER]
        self.open_s: Callable[[], float] = lambda: 0.0
        self.wrong, self.asked, self.apart = 0, list[str](), list[str]()
        self.full: Exception | None = None
        self.dead = asyncio.Event()
        self.waits = WaitBoard()
        self.proof = GuestProof(
            "float32",
            max_model_len,
            self.waits,
            open_s=lambda: self.open_s(),
            told_wrong=self._wrong,
            set_apart=self._set_apart,
        )
        self.live: Any = SimpleNamespace(
            engine_id="lent",
            incarnation="a1",
            route=SimpleNamespace(generate=self._generate),
            news_of_death=self._news,
        )

    def prove(self) -> Awaitable[None]:
        receiver: Any = SimpleNamespace(answer=self._answer)
        return self.proof.prove(self.live, receiver, RUNS)

    async def _answer(self, offer: Offer, *, deadline_s: float) -> KnownAnswer | None:
        assert offer == RUNS
        found = self.known.pop(0) if len(self.known) > 1 else self.known[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def _generate(self, request_id: str, token_ids: tuple[int, ...], **how: Any) -> RouteOutput:
        assert (token_ids, how["max_tokens"], how["temperature"], how["top_logprobs"]) == ((5, 6), 2, 0.0, 2)
        assert request_id not in self.asked
        self.asked.append(request_id)
        reply = next(self.replies)
        if isinstance(reply, Exception):
            raise reply
        if reply is None:
            await asyncio.Event().wait()
        assert reply is not None
        return reply

    async def _news(self) -> None:
        self.dead.set()

    def _wrong(self) -> None:
        self.wrong += 1

    def _set_apart(self, incarnation: str) -> None:
        if self.full is not None:
            raise self.full
        self.apart.append(incarnation)


@in_loop
async def test_a_right_answer_passes_and_is_told_with_its_numbers() -> None:
    scene = Scene(RIGHT)
    await scene.prove()
    assert scene.proof.words == (
        "proven",
        "version 7, at the guest's start: 0 nats apart at most, of 0.01 allowed, over 2 tokens",
    )
    assert (scene.wrong, scene.apart) == (0, ["a1"])
    assert scene.waits.snapshot() == ()


@in_loop
async def test_a_wrong_answer_ends_the_incarnation_and_is_counted_with_its_numbers() -> None:
    scene = Scene(WRONG)
    with pytest.raises(WrongAnswer, match=r"version 7's known question wrongly: 0\.25 nats apart at most"):
        await scene.prove()
    assert (scene.wrong, scene.apart) == (1, [])
    assert scene.proof.words[0] == "wrong"
    assert "0.25 nats" in scene.proof.words[1]
    assert "1 in a row" in scene.proof.words[1]


@in_loop
async def test_wrong_answers_in_a_row_end_the_executor_and_a_right_one_begins_anew() -> None:
    scene = Scene(WRONG, WRONG, RIGHT, WRONG, WRONG, WRONG)
    for _ in range(2):
        with pytest.raises(WrongAnswer):
            await scene.prove()
        scene.asked.clear()
    await scene.prove()
    for _ in range(WRONG_MAX - 1):
        scene.asked.clear()
        with pytest.raises(WrongAnswer):
            await scene.prove()
    scene.asked.clear()
    with pytest.raises(ContractError, match="so did 3 guests in a row") as caught:
        await scene.prove()
    assert "within 0.01 nats in float32" in caught.value.expected
    assert "guest.model" in caught.value.to_do
    assert scene.wrong == 5


@in_loop
async def test_log_probs_that_are_none_are_a_wrong_answer() -> None:
    scene = Scene(lost(ValueError("log-probs [nan]")))
    with pytest.raises(WrongAnswer, match=r"answers no log-probs: .*nan"):
        await scene.prove()
    assert scene.wrong == 1


@in_loop
async def test_a_guest_that_dies_meanwhile_has_not_answered_wrongly() -> None:
    scene = Scene(lost(ConnectionResetError()))
    with pytest.raises(EngineLost):
        await scene.prove()
    assert scene.dead.is_set()
    assert scene.wrong == 0


@in_loop
async def test_a_request_that_the_engine_refuses_is_no_wrong_answer() -> None:
    scene = Scene(EngineError("refused with status 400: unknown token"))
    with pytest.raises(EngineError, match="status 400"):
        await scene.prove()
    assert scene.wrong == 0


@in_loop
async def test_an_answer_under_another_version_proves_nothing() -> None:
    mixed = (VersionSpan(7, 0, 1), VersionSpan(8, 1, 2))
    scene = Scene(RouteOutput(RIGHT.output_ids, RIGHT.logprobs, mixed, RIGHT.finish, RIGHT.top))
    with pytest.raises(EngineError, match="answered under") as caught:
        await scene.prove()
    assert "version 7 alone" in caught.value.expected
    assert scene.apart == []


@in_loop
async def test_a_gate_that_is_shut_is_waited_for_by_name_and_a_request_that_ran_out_is_asked_again() -> None:
    scene = Scene(lost(TimeoutError()), lost(TimeoutError()), None)
    proving = asyncio.ensure_future(scene.prove())
    while not any(wait.what == "answer to the known question" for wait in scene.waits.snapshot()):
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert not proving.done()
    assert scene.asked == ["known-a1-1", "known-a1-2", "known-a1-3"]
    assert scene.proof.words == ("asks", "version 7")
    proving.cancel()
    await asyncio.gather(proving, return_exceptions=True)
    assert scene.waits.snapshot() == ()
    assert scene.wrong == 0


@in_loop
async def test_only_seconds_with_an_open_gate_count_against_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_proof, "OPEN_S", 0.02)
    monkeypatch.setattr(guest_proof, "_LOOK_S", 0.01)
    scene = Scene(lost(TimeoutError()), None)
    looks = 0

    def open_s() -> float:
        nonlocal looks
        looks += 1
        return 100.0 if looks < 20 else 100.03  # for long it is shut

    scene.open_s = open_s
    with pytest.raises(EngineError, match="did not answer the known question") as caught:
        await scene.prove()
    assert looks == 20
    assert "in which its gate was open" in caught.value.expected
    assert (scene.asked, scene.wrong) == (["known-a1-1", "known-a1-2"], 0)
    assert scene.waits.snapshot() == ()


@pytest.mark.parametrize(
    ("known", "max_model_len", "said"),
    [
        (None, 64, "nobody upstream tells what it must answer"),
        (ANSWER, 3, "the question takes 4 tokens, and guest.max_model_len is 3"),
        (MalformedRecord("this is no known answer"), 64, "this is no known answer"),
    ],
)
@in_loop
async def test_a_version_without_an_answer_is_offered_and_named(
    known: KnownAnswer | Exception | None, max_model_len: int, said: str
) -> None:
    scene = Scene(RIGHT, max_model_len=max_model_len)
    scene.known = [known]
    await scene.prove()
    assert scene.proof.words == ("unproven", f"version 7: {said}")
    assert (scene.asked, scene.apart) == ([], ["a1"])


@in_loop
async def test_whoever_knows_the_answer_and_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_proof, "_AGAIN_S", 0.0)
    scene = Scene(RIGHT)
    away = DeadlineExceeded("no object", boundary="transfer")
    scene.known = [away, TransferError("what a version answers is not heard of"), ANSWER]
    await scene.prove()
    assert scene.proof.words[0] == "proven"


@in_loop
async def test_a_publisher_that_refuses_is_raised() -> None:
    scene = Scene(RIGHT)
    scene.known = [Refused("the token is wrong")]
    with pytest.raises(Refused):
        await scene.prove()


@in_loop
async def test_a_guest_whose_own_tokens_cannot_be_set_apart_is_offered_once_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guest_proof, "_AGAIN_S", 0.01)
    scene = Scene(RIGHT)
    scene.full = ClusterError("cannot be written: No space left on device")
    proving = asyncio.ensure_future(scene.prove())
    while scene.proof.words[0] != "waits":
        await asyncio.sleep(0.001)
    assert "No space left" in scene.proof.words[1]
    assert [wait.what for wait in scene.waits.snapshot()] == ["room for its counts"]
    scene.full = None
    await proving
    assert (scene.proof.words[0], scene.apart) == ("proven", ["a1"])


@in_loop
async def test_a_guest_without_a_page_is_replaced() -> None:
    scene = Scene(RIGHT)
    scene.full = EngineError("there is no page")
    with pytest.raises(EngineError, match="no page"):
        await scene.prove()
