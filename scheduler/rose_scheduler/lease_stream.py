"""One client's stream of lease calls, on the client's side.

Invariants
- Calls go out in the order in which they were made; what is called while a message is written goes out in the next.
- A call is answered, or fails with the stream that carried it, as a call of its own would: with an AioRpcError.
- Nothing is written before the service has greeted: it refuses in words only who has not begun to speak.
- A question that nobody waits for any more is given up. If it is granted all the same, the lease is ended, unless the
  stream breaks before; then it ends with its term.
- What waits to be written is bounded: a stream on which nothing moves for so long is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from rose.errors import ContractError
from rose.proto.v1 import scheduler_pb2 as wire

_MESSAGE_BYTES = 1 << 15
"""Half of what the service takes in one message."""
_CALL_BYTES_MAX = 1 << 14
_UNWRITTEN_MAX = 8192


class LeaseStream:
    """Made of a `Scheduler.Leases` call that has just begun, in a running event loop; of no more use once `over`."""

    def __init__(self, call: Any) -> None:
        self.over = False
        self._call = call
        self._last_id = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._given_up: dict[int, str] = {}
        self._to_say: list[Any] = []
        self._greeted = asyncio.Event()
        self._wake = asyncio.Event()
        self._writing = asyncio.create_task(self._write(), name="lease calls")
        self._reading = asyncio.create_task(self._read(), name="lease answers")

    async def ask(self, request: Any, timeout_s: float) -> Any:
        """The answer to an `AskLeaseRequest`. Raises AioRpcError if the stream breaks, or after `timeout_s`."""
        call_id, answer = self._say(ask=request)
        try:
            return (await _in_time(answer, timeout_s)).asked
        except BaseException:
            if self._pending.pop(call_id, None) is not None:
                self._given_up[call_id] = request.lease_id
                self._put(wire.LeaseCall(call_id=call_id, give_up=wire.GiveUpLease()))
            elif answer.done() and not answer.cancelled() and answer.exception() is None:
                self._unwanted(answer.result(), request.lease_id)
            raise

    async def end(self, request: Any, timeout_s: float) -> Any:
        """The answer to an `EndLeaseRequest`; raises as `ask` does."""
        return (await self._told(timeout_s, end=request)).ended

    async def end_trajectory(self, request: Any, timeout_s: float) -> Any:
        """The answer to an `EndTrajectoryRequest`; raises as `ask` does."""
        return (await self._told(timeout_s, end_trajectory=request)).trajectory_ended

    def close(self) -> None:
        """End it; calls under way are cancelled."""
        self.over = True
        self._reading.cancel()
        self._writing.cancel()
        self._call.cancel()
        for answer in self._pending.values():
            answer.cancel()

    async def _told(self, timeout_s: float, **call: Any) -> Any:
        call_id, answer = self._say(**call)
        try:
            return await _in_time(answer, timeout_s)
        finally:
            self._pending.pop(call_id, None)

    def _say(self, **call: Any) -> tuple[int, asyncio.Future[Any]]:
        self._last_id += 1
        message = wire.LeaseCall(call_id=self._last_id, **call)
        if message.ByteSize() > _CALL_BYTES_MAX:
            raise ContractError(f"a lease call of {message.ByteSize()} bytes", expected=f"{_CALL_BYTES_MAX} at most")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[self._last_id] = answer
        self._put(message)
        return self._last_id, answer

    def _put(self, message: Any) -> None:
        self._to_say.append(message)
        self._wake.set()
        if len(self._to_say) > _UNWRITTEN_MAX:
            self._call.cancel()

    async def _write(self) -> None:
        # A stream that is over refuses what is written to it; why, the reader hears.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._greeted.wait()
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._to_say:
                    await self._call.write(wire.LeaseCalls(calls=self._next_calls()))

    def _next_calls(self) -> list[Any]:
        room, count = _MESSAGE_BYTES, 0
        for call in self._to_say:
            room -= call.ByteSize()
            if count and room < 0:
                break
            count += 1
        calls, self._to_say = self._to_say[:count], self._to_say[count:]
        return calls

    async def _read(self) -> None:
        code, why = grpc.StatusCode.UNAVAILABLE, "its stream ended"
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._greeted.set()
                for answer in message.answers:
                    self._hear(answer)
        except grpc.aio.AioRpcError as error:
            code, why = error.code(), error.details() or str(error.code())
        finally:
            self._broke(code, why)

    def _hear(self, answer: Any) -> None:
        if (waiting := self._pending.pop(answer.call_id, None)) is not None:
            if not waiting.done():
                waiting.set_result(answer)
        elif (lease_id := self._given_up.pop(answer.call_id, None)) is not None:
            self._unwanted(answer, lease_id)

    def _unwanted(self, answer: Any, lease_id: str) -> None:
        if answer.asked.HasField("grant"):
            end = wire.EndLeaseRequest(lease_id=lease_id, outcome=wire.LEASE_OUTCOME_ABANDONED)
            self._last_id += 1
            self._put(wire.LeaseCall(call_id=self._last_id, end=end))

    def _broke(self, code: grpc.StatusCode, why: str) -> None:
        self.over = True
        self._writing.cancel()
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(_failed(code, why))


async def _in_time(answer: asyncio.Future[Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            # Behind a shield, since whoever gives up must see what comes in between.
            return await asyncio.shield(answer)
    except TimeoutError as error:
        raise _failed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer") from error


def _failed(code: grpc.StatusCode, why: str) -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, none, none, details=why)
