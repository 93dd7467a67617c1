"""Asks an executor what its engines counted: the side of whoever samples on a lent engine.

Invariants
- Every call has a deadline and stands on the wait board while it lasts.
- An executor that is away or refuses is an error at once: whoever asks knows whether asking again makes sense.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from rose.access import credentials
from rose.certificates import Certificates
from rose.errors import ContractError, DeadlineExceeded, EngineError
from rose.peer_channel import PeerChannel
from rose.peer_tls import tls_trouble
from rose.proto.v1 import executor_pb2 as wire
from rose.proto.v1.executor_pb2_grpc import ExecutorStub
from rose.waits import WaitBoard
from rose_executor.token_page import RequestCount

_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 4 << 20),)


@dataclass(frozen=True, slots=True)
class Counts:
    """What one incarnation generated. All counts are final where it is not `alive`; see the service's messages.

    `requests` has those that its page knows: not one whose slot was reused since (see `token_page`).
    """

    known: bool
    alive: bool
    total_tokens: int
    requests: Mapping[str, RequestCount]


class CountsClient:
    """The counts of one executor, at `address` (host:port)."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        waits: WaitBoard,
        timeout_s: float = 10.0,
        certificates: Certificates | None = None,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise ContractError(f"a counts client with timeout_s={timeout_s}", expected="a time that ends")
        self._whom = f"executor {address}"
        self._address = address
        self._certificates = certificates
        self._credentials = credentials(token)
        self._waits = waits
        self._timeout_s = timeout_s
        self._channel = PeerChannel(address, certificates, ExecutorStub, timeout_s, _CHANNEL_OPTIONS)
        self._closed = False

    async def counts(self, incarnation: str, request_ids: Iterable[str] = ()) -> Counts:
        """Raises EngineError if the executor does not answer or refuses, DeadlineExceeded if not in time."""
        self._raise_if_closed()
        request = wire.CountsRequest(incarnation=incarnation, request_ids=request_ids)
        call = self._channel.stub.Counts(request, timeout=self._timeout_s, metadata=self._credentials)
        try:
            reply = await self._waits.within(call, "counts", self._whom, self._timeout_s, boundary="engine")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(
                    f"{self._whom}: no counts after {self._timeout_s:g} s", boundary="engine"
                ) from error
            trouble = ""
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._channel.renew()
                trouble = await tls_trouble(self._address, self._certificates, self._waits)
            why = f"it {trouble}" if trouble else f"{error.code().name.lower()}: {error.details()}"
            raise EngineError(f"{self._whom}: no counts: {why}") from error
        except asyncio.CancelledError:
            # A channel that closes cancels its calls, and with them whoever waits for one.
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise EngineError(f"{self._whom}: no counts: the client was closed") from None
        if reply is None:  # what gRPC makes of bytes that are no such message
            raise EngineError(
                f"{self._whom}, asked for counts, answers nonsense", to_do="check that both sides are of one version"
            )
        return Counts(
            reply.known, reply.alive, reply.total_tokens, {one.request_id: _count(one) for one in reply.requests}
        )

    async def close(self) -> None:
        """End every call that is under way with EngineError; further ones are ContractErrors."""
        self._closed = True
        await self._channel.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ContractError(f"the counts client of {self._whom} is closed", expected="calls before `close`")


def _count(message: Any) -> RequestCount:
    return RequestCount(
        message.tokens,
        message.first_version if message.HasField("first_version") else None,
        message.last_version if message.HasField("last_version") else None,
        message.finished,
    )
