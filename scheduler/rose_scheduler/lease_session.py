"""One client's stream of lease calls, on the scheduler's side.

Invariants
- Every call that was read is answered once, unless the client breaks the stream off.
- When it ends, however it does, what is still asked for is given up; what is held stays held.
- What is kept for one client is bounded: its questions by the core's line, its answers by `_ANSWERS_MAX`, beside those
  to its last message and to its questions, since nothing more is read from a client that does not read.
- What nobody can have meant ends the stream of whoever said it, and nothing else.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from rose.proto.v1 import scheduler_pb2 as wire
from rose_scheduler.desk import Desk
from rose_scheduler.events import Reason, Refuse
from rose_scheduler.wire import VERDICTS, Malformed, ask_reply, asked, ended, trajectory_over

_ANSWERS_MAX = 4096
_ANSWERS_AT_ONCE = 256
_LEASE_TOKEN_BYTES = 16


class LeaseSession:
    """Answers the calls of one client from a desk, through `write`."""

    def __init__(self, desk: Desk, write: Callable[[Any], Awaitable[None]]) -> None:
        self._desk = desk
        self._write = write
        self._open: dict[int, asyncio.Task[Any]] = {}
        self._answers: list[Any] = []
        self._to_send = asyncio.Event()
        self._sent = asyncio.Event()
        self._over = False

    async def serve(self, messages: AsyncIterator[Any]) -> str:
        """Until the client says no more or the desk closes, which is "", or what no answer can be given to.

        Raises what the core or `write` raised, if one does.
        """
        await self._write(wire.LeaseAnswers())  # a greeting: from now on the client may speak
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(), name="lease answers")
                reading = group.create_task(self._read(messages, group), name="lease calls")
                closing = group.create_task(self._desk.closed.wait(), name="the desk closes")
                await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
                trouble = reading.result() if reading.done() else ""
                for task in (reading, closing, *self._open.values()):
                    task.cancel()
                while self._open:
                    await asyncio.sleep(0)
                self._over = True
                self._to_send.set()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return trouble

    async def _read(self, messages: AsyncIterator[Any], group: asyncio.TaskGroup) -> str:
        async for message in messages:
            for call in message.calls:
                if trouble := self._take(call, group):
                    return trouble
            while len(self._answers) > _ANSWERS_MAX:
                self._sent.clear()
                await self._sent.wait()
        return ""

    def _take(self, call: Any, group: asyncio.TaskGroup) -> str:
        match call.WhichOneof("call"):
            case "ask":
                if call.call_id in self._open:
                    return f"call {call.call_id} is open already"
                question = group.create_task(self._asked(call.ask), name=f"lease {call.ask.lease_id}")
                self._open[call.call_id] = question
                question.add_done_callback(partial(self._decided, call.call_id))
            case "end":
                self._say(wire.LeaseAnswer(call_id=call.call_id, ended=self._ended(call.end)))
            case "end_trajectory":
                over = self._trajectory_over(call.end_trajectory)
                self._say(wire.LeaseAnswer(call_id=call.call_id, trajectory_ended=over))
            case "give_up":
                if call.call_id in self._open:
                    self._open[call.call_id].cancel()
            case _:
                return f"call {call.call_id} says nothing that is known"
        return ""

    async def _asked(self, request: Any) -> Any:
        try:
            event = asked(request, time.monotonic(), secrets.token_urlsafe(_LEASE_TOKEN_BYTES))
        except Malformed as error:
            return ask_reply(Refuse(request.lease_id, Reason.MALFORMED, str(error)), 0.0)
        return ask_reply(await self._desk.ask(event), time.monotonic())

    def _decided(self, call_id: int, question: asyncio.Task[Any]) -> None:
        del self._open[call_id]
        if question.cancelled():
            self._say(wire.LeaseAnswer(call_id=call_id, given_up=wire.GiveUpLease()))
        elif question.exception() is None:
            self._say(wire.LeaseAnswer(call_id=call_id, asked=question.result()))

    def _ended(self, request: Any) -> Any:
        try:
            answer = self._desk.end(ended(request))
        except Malformed as error:
            return wire.EndLeaseReply(verdict=wire.END_VERDICT_MALFORMED, what=str(error))
        return wire.EndLeaseReply(verdict=VERDICTS[answer.verdict])

    def _trajectory_over(self, request: Any) -> Any:
        try:
            answer = self._desk.over(trajectory_over(request))
        except Malformed as error:
            return wire.EndLeaseReply(verdict=wire.END_VERDICT_MALFORMED, what=str(error))
        return wire.EndLeaseReply(verdict=VERDICTS[answer.verdict])

    def _say(self, answer: Any) -> None:
        self._answers.append(answer)
        self._to_send.set()

    async def _send(self) -> None:
        while not self._over or self._answers:
            await self._to_send.wait()
            self._to_send.clear()
            while self._answers:
                now, self._answers = self._answers[:_ANSWERS_AT_ONCE], self._answers[_ANSWERS_AT_ONCE:]
                await self._write(wire.LeaseAnswers(answers=now))
                self._sent.set()
