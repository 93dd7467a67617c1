"""The stream of leases, both ends: what goes together, what breaks, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from service_tools import LONG_S, TOKEN, site, turn, until

from rose.access import credentials
from rose.errors import ContractError
from rose.metrics import SchedulerMetrics
from rose.proto.v1 import scheduler_pb2 as wire
from rose.waits import WaitBoard
from rose_scheduler.desk import Desk
from rose_scheduler.lease_session import _ANSWERS_MAX, LeaseSession
from rose_scheduler.lease_stream import _UNWRITTEN_MAX, LeaseStream
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement


def question(number: int = 0, wait_ms: float = 60_000.0) -> Any:
    return wire.AskLeaseRequest(
        lease_id=f"lease-{number}",
        trajectory_id=f"trajectory-{number}",
        group_id="g",
        turn=1,
        wait_ms=wait_ms,
        hold_ms=60_000.0,
    )


def asking(call_id: int, number: int = 0) -> Any:
    return wire.LeaseCall(call_id=call_id, ask=question(number))


def granted(call_id: int) -> Any:
    grant = wire.LeaseGrant(engine_id="e", incarnation="1", address="http://e", hold_ms=1000.0, token="t")
    return wire.LeaseAnswer(call_id=call_id, asked=wire.AskLeaseReply(grant=grant))


class Wire:
    """The call under a `LeaseStream`, in the test's hands: what was written, what is to be read."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.cancelled = False
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self.answer()

    async def write(self, message: Any) -> None:
        self.written.append(message)
        await self.may_write.wait()

    async def read(self) -> Any:
        return await self._answers.get()

    def cancel(self) -> None:
        self.cancelled = True
        self.end()

    def answer(self, *answers: Any) -> None:
        self._answers.put_nowait(wire.LeaseAnswers(answers=answers))

    def end(self) -> None:
        self._answers.put_nowait(grpc.aio.EOF)

    def said(self) -> list[str]:
        return [call.WhichOneof("call") for message in self.written for call in message.calls]


def test_what_is_called_while_a_message_is_written_goes_out_as_one() -> None:
    async def check() -> None:
        call = Wire()
        stream = LeaseStream(call)
        call.may_write.clear()
        asks = [asyncio.create_task(stream.ask(question(number), LONG_S)) for number in range(40)]
        await until(lambda: len(call.written) == 1)
        asks += [asyncio.create_task(stream.ask(question(number), LONG_S)) for number in range(40, 80)]
        await asyncio.sleep(0)
        call.may_write.set()
        await until(lambda: len(call.said()) == 80)
        assert len(call.written) == 2
        call.answer(*(granted(call_id) for call_id in range(80, 0, -1)))
        assert all(answer.HasField("grant") for answer in await asyncio.gather(*asks))
        stream.close()

    asyncio.run(check())


def test_no_message_is_larger_than_the_service_takes() -> None:
    async def check() -> None:
        call = Wire()
        stream = LeaseStream(call)
        long = [
            wire.EndLeaseRequest(lease_id="x" * 8000, outcome=wire.LEASE_OUTCOME_DONE, tokens=number)
            for number in range(20)
        ]
        ends = [asyncio.create_task(stream.end(each, LONG_S)) for each in long]
        await until(lambda: len(call.said()) == 20)
        assert max(message.ByteSize() for message in call.written) < 1 << 16
        assert [one.end.tokens for message in call.written for one in message.calls] == list(range(20))
        with pytest.raises(ContractError, match="a lease call of"):
            await stream.end(wire.EndLeaseRequest(lease_id="x" * 20_000), LONG_S)
        stream.close()
        await asyncio.gather(*ends, return_exceptions=True)

    asyncio.run(check())


def test_a_grant_that_crosses_with_the_giving_up_is_ended() -> None:
    async def check() -> None:
        call = Wire()
        stream = LeaseStream(call)
        waiting = asyncio.create_task(stream.ask(question(), LONG_S))
        await until(lambda: call.said() == ["ask"])
        waiting.cancel()
        await until(lambda: call.said() == ["ask", "give_up"])
        call.answer(granted(1))
        await until(lambda: call.said() == ["ask", "give_up", "end"])
        (end,) = (one.end for one in call.written[-1].calls)
        assert (end.lease_id, end.outcome, end.tokens) == ("lease-0", wire.LEASE_OUTCOME_ABANDONED, 0)
        stream.close()

    asyncio.run(check())


def test_nothing_is_said_before_the_greeting() -> None:
    async def check() -> None:
        call = Wire()
        greeting = call._answers.get_nowait()
        stream = LeaseStream(call)
        waiting = asyncio.create_task(stream.ask(question(), LONG_S))
        for _ in range(100):
            await asyncio.sleep(0)
        assert call.said() == []
        call._answers.put_nowait(greeting)
        await until(lambda: call.said() == ["ask"])
        stream.close()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(check())


def test_a_stream_on_which_nothing_moves_is_ended_before_it_holds_too_much() -> None:
    async def check() -> None:
        call = Wire()
        call.may_write.clear()
        stream = LeaseStream(call)
        asks = [asyncio.create_task(stream.ask(question(number), LONG_S)) for number in range(_UNWRITTEN_MAX + 99)]
        errors = await asyncio.gather(*asks, return_exceptions=True)
        assert call.cancelled
        assert {type(error) for error in errors} == {grpc.aio.AioRpcError}

    asyncio.run(check())


@pytest.mark.parametrize("first", ["it is heard", "it is given up"])
def test_a_grant_that_was_heard_but_not_taken_is_ended(first: str) -> None:
    """The answer and the end of whoever waits for it come at one moment, in either order."""

    async def check() -> None:
        call = Wire()
        stream = LeaseStream(call)
        waiting = asyncio.create_task(stream.ask(question(), LONG_S))
        await until(lambda: call.said() == ["ask"])
        acts = [lambda: stream._hear(granted(1)), waiting.cancel]
        for act in acts if first == "it is heard" else acts[::-1]:
            act()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: call.said() == ["ask", "end"])
        stream.close()

    asyncio.run(check())


def test_a_stream_that_ends_fails_those_who_wait_one_by_one_and_is_over() -> None:
    async def check() -> None:
        call = Wire()
        stream = LeaseStream(call)
        asks = [asyncio.create_task(stream.ask(question(number), LONG_S)) for number in range(3)]
        await until(lambda: len(call.said()) == 3)
        call.end()
        errors = await asyncio.gather(*asks, return_exceptions=True)
        assert {type(error) for error in errors} == {grpc.aio.AioRpcError}
        assert len({id(error) for error in errors}) == 3
        assert stream.over

    asyncio.run(check())


def test_a_question_without_an_answer_in_time_is_given_up() -> None:
    async def check() -> None:
        call = Wire()
        stream = LeaseStream(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.ask(question(), 0.01)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: call.said() == ["ask", "give_up"])
        stream.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    "calls",
    [
        [wire.LeaseCall(call_id=1)],
        [asking(1), asking(1, 1)],
        [asking(1), wire.LeaseCall()],
    ],
)
def test_what_nobody_can_have_meant_ends_its_own_stream_alone(calls: list[Any]) -> None:
    async def check() -> None:
        async with site() as here:
            other = asyncio.create_task(here.say(question(9)))
            await until(lambda: len(here.desk.core.line) == 1)
            wrong = here.another_stream()
            await wrong._call.write(wire.LeaseCalls(calls=calls))
            await until(lambda: wrong.over)
            assert await wrong._call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: len(here.desk.core.line) == 1)
            await here.joined()
            assert (await other).grant.engine_id == "e"

    asyncio.run(check())


def test_a_stream_that_breaks_gives_up_what_it_asked_for_and_keeps_what_it_holds() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            breaking = here.another_stream()
            assert (await breaking.ask(question(0), LONG_S)).grant.engine_id == "e"
            waiting = [asyncio.create_task(breaking.ask(question(number), LONG_S)) for number in (1, 2)]
            await until(lambda: len(here.desk.core.line) == 2)
            breaking.close()
            await until(lambda: len(here.desk.core.line) == 0)
            assert len(here.desk.core.leases) == 1
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (await here.say(wire.EndLeaseRequest(lease_id="lease-0", outcome=1))).verdict == 1

    asyncio.run(check())


def test_a_client_goes_on_over_a_new_stream_when_the_old_one_breaks() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined(most=2)
            async with here.client.lease(turn(), wait_s=LONG_S, hold_s=LONG_S):
                stream = here.client._calls._stream()
                stream._call.cancel()
                await until(lambda: stream.over)
            async with here.client.lease(turn(1), wait_s=LONG_S, hold_s=LONG_S):
                pass
            assert here.sample("leases_ended_total", verdict="ended") == 2

    asyncio.run(check())


def test_who_says_no_more_still_hears_all_answers() -> None:
    async def check() -> None:
        async with site() as here:
            await here.joined()
            call = here.stub.Leases(metadata=credentials(TOKEN))
            end = wire.EndLeaseRequest(lease_id="never", outcome=1)
            ends = [wire.LeaseCall(call_id=number, end=end) for number in range(2, 700)]
            await call.write(wire.LeaseCalls(calls=[asking(1), *ends]))
            await call.done_writing()
            answers = [answer.call_id async for message in call for answer in message.answers]
            assert sorted(answers) == list(range(1, 700))
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(check())


def test_a_desk_that_closes_ends_its_streams_once_all_is_answered() -> None:
    async def check() -> None:
        async with site() as here:
            waiting = asyncio.create_task(here.say(question()))
            await until(lambda: len(here.desk.core.line) == 1)
            here.desk.close()
            assert (await waiting).refusal.reason == wire.LEASE_REASON_CLOSING
            await until(lambda: here.leases.over)

    asyncio.run(check())


def session(write: Callable[[Any], Any]) -> tuple[Desk, LeaseSession]:
    desk = Desk(Placement(Limits()), WaitBoard(), SchedulerMetrics())
    return desk, LeaseSession(desk, write)


def test_what_is_asked_and_given_up_in_one_message_is_answered_once() -> None:
    async def check() -> None:
        answers: list[Any] = []

        async def write(message: Any) -> None:
            answers.extend(message.answers)

        desk, here = session(write)
        over = asyncio.Event()

        async def calls() -> AsyncIterator[Any]:
            yield wire.LeaseCalls(calls=[asking(1), wire.LeaseCall(call_id=1, give_up=wire.GiveUpLease())])
            yield wire.LeaseCalls(calls=[wire.LeaseCall(call_id=7, give_up=wire.GiveUpLease())])
            await over.wait()

        serving = asyncio.create_task(here.serve(calls()))
        await until(lambda: len(answers) == 1)
        assert (answers[0].call_id, answers[0].WhichOneof("answer")) == (1, "given_up")
        over.set()
        assert await serving == ""
        assert len(desk.core.leases) == len(answers) - 1 == 0
        desk.close()

    asyncio.run(check())


def test_nothing_more_is_read_from_a_client_that_does_not_read() -> None:
    at_once, messages = 100, 200

    async def check() -> None:
        stuck = asyncio.Event()
        read = 0

        async def write(message: Any) -> None:
            if message.answers:
                await stuck.wait()

        async def calls() -> AsyncIterator[Any]:
            nonlocal read
            for _ in range(messages):
                end = wire.EndLeaseRequest(lease_id="never", outcome=1)
                yield wire.LeaseCalls(calls=[wire.LeaseCall(call_id=number, end=end) for number in range(at_once)])
                read += 1
                await asyncio.sleep(0)

        desk, here = session(write)
        serving = asyncio.create_task(here.serve(calls()))
        await until(lambda: len(here._answers) > _ANSWERS_MAX)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(here._answers) <= _ANSWERS_MAX + at_once
        assert read < messages / 2
        stuck.set()
        assert await serving == ""
        assert read == messages
        desk.close()

    asyncio.run(check())


def test_a_core_that_raises_ends_the_stream_with_what_it_raised() -> None:
    async def check() -> None:
        async def write(message: Any) -> None:
            pass

        def broken(*_: object) -> None:
            raise ContractError("a rule does not hold")

        async def calls() -> AsyncIterator[Any]:
            yield wire.LeaseCalls(calls=[asking(1)])
            await asyncio.Event().wait()

        desk, here = session(write)
        desk.core.step = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(ContractError, match="a rule does not hold"):
            await here.serve(calls())
        with pytest.raises(ContractError, match="a rule does not hold"):
            await desk.failed

    asyncio.run(check())
