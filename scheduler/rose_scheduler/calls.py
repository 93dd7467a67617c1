"""Calls to a scheduler: repeated while it is away, until their deadline.

Invariants
- A call is only repeated if that changes nothing, which holds for every call of the scheduler.
- What no repeating mends (a wrong token, certificates that do not fit, another kind of server) is said at once.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rose.access import credentials
from rose.certificates import Certificates
from rose.errors import ContractError, DeadlineExceeded, SchedulerError
from rose.peer_channel import PeerChannel
from rose.peer_tls import EXPECTED, TO_DO, tls_trouble
from rose.proto.v1.scheduler_pb2_grpc import SchedulerStub
from rose.waits import WaitBoard
from rose_scheduler.lease_stream import LeaseStream

GRACE_S = 2.0
"""How much longer than it was asked to a scheduler may take to say that there is no place."""
_PAUSE_S = (0.02, 0.5)
"""Between two tries, from and to; doubling."""
_SAME_VERSION = "check that scheduler and client are of one version"
_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED: "give it the token of the scheduler's file",
    grpc.StatusCode.UNIMPLEMENTED: "check that this is the address of a scheduler, of this version",
    grpc.StatusCode.INVALID_ARGUMENT: _SAME_VERSION,
}


class Calls:
    """The channel to one scheduler; `whom` is its name on the wait board. Raises ContractError for an endless wait."""

    def __init__(
        self, address: str, *, token: str, waits: WaitBoard, timeout_s: float, certificates: Certificates | None = None
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise ContractError(f"a scheduler's client with timeout_s={timeout_s}", expected="a time that ends")
        self.whom = f"scheduler {address}"
        self._address = address
        self._certificates = certificates
        self._waits = waits
        self._timeout_s = timeout_s
        self._credentials = credentials(token)
        self._channel = PeerChannel(address, certificates, SchedulerStub, timeout_s)
        self._leases: LeaseStream | None = None
        self._closed = False

    async def answer(self, what: str, method: str, request: Any) -> Any:
        """One answer to a call of its own, by the name of its method, that does not wait for anything over there.

        Raises SchedulerError if it is refused, DeadlineExceeded after `timeout_s`.
        """

        def call(left_s: float) -> Any:
            return getattr(self._channel.stub, method)(request, timeout=left_s, metadata=self._credentials)

        with self._waits.waiting(what, self.whom, self._timeout_s):
            return await self._repeated(what, call, self._timeout_s)

    async def lease_asked(self, request: Callable[[float], Any], timeout_s: float) -> Any:
        """The answer to a question of the seconds that are left, off the board, at most `GRACE_S` after the last."""
        return await self._repeated(
            "a lease", lambda left_s: self._stream().ask(request(left_s), left_s + GRACE_S), timeout_s
        )

    async def lease_ended(self, request: Any) -> Any:
        """As `answer`, on the stream on which leases are asked for."""
        what = "the end of a lease"
        with self._waits.waiting(what, self.whom, self._timeout_s):
            return await self._repeated(what, lambda left_s: self._stream().end(request, left_s), self._timeout_s)

    async def trajectory_ended(self, request: Any) -> Any:
        """As `answer`, on that stream as well."""
        what = "the end of a trajectory"
        with self._waits.waiting(what, self.whom, self._timeout_s):
            return await self._repeated(
                what, lambda left_s: self._stream().end_trajectory(request, left_s), self._timeout_s
            )

    def _stream(self) -> LeaseStream:
        if self._leases is None or self._leases.over:
            self._leases = LeaseStream(self._channel.stub.Leases(metadata=self._credentials))
        return self._leases

    async def _repeated(self, what: str, call: Callable[[float], Awaitable[Any]], timeout_s: float) -> Any:
        until_s = time.monotonic() + timeout_s
        pause_s, most_s = _PAUSE_S
        while True:
            if self._closed:
                raise ContractError(f"the client of {self.whom} is closed", expected="calls before `close`")
            left_s = max(0.001, until_s - time.monotonic())
            try:
                return await self._once(what, call(left_s))
            except grpc.aio.AioRpcError as error:
                if error.code() in _FINAL:
                    to_do = _FINAL[error.code()]
                    raise SchedulerError(f"{self.whom} refuses: {error.details()}", to_do=to_do) from error
                if error.code() is grpc.StatusCode.UNAVAILABLE and not self._channel.renew():
                    await self._raise_if_tls_does_not_fit()
                if time.monotonic() + pause_s >= until_s:
                    raise self.late(what, timeout_s, error.details() or str(error.code())) from error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, most_s)

    async def _raise_if_tls_does_not_fit(self) -> None:
        trouble = await tls_trouble(self._address, self._certificates, self._waits)
        if trouble:
            raise SchedulerError(f"{self.whom} {trouble}", expected=EXPECTED, to_do=TO_DO)

    def late(self, what: str, timeout_s: float, why: str) -> DeadlineExceeded:
        """The error for a deadline that is over."""
        return DeadlineExceeded(f"{self.whom}: not {what} after {timeout_s:.3g} s: {why}", boundary="scheduler")

    async def close(self) -> None:
        """End every call that is under way with SchedulerError; further ones are ContractErrors."""
        self._closed = True
        if self._leases is not None:
            self._leases.close()
        await self._channel.close()

    async def _once(self, what: str, call: Awaitable[Any]) -> Any:
        try:
            answer = await call
        except asyncio.CancelledError:
            # A channel that closes cancels its calls, and with them, as it seems, whoever waits for one.
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise SchedulerError(f"{self.whom}: not {what}: the client was closed") from None
        if answer is None:  # what gRPC makes of bytes that are no such message
            raise self.nonsense(what, "no message at all")
        return answer

    def nonsense(self, what: str, answer: str) -> SchedulerError:
        """The error for an answer that no scheduler of this version gives."""
        return SchedulerError(f"{self.whom}, asked for {what}, answers nonsense: {answer}", to_do=_SAME_VERSION)
