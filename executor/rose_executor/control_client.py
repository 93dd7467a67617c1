"""The owner's side of an engine's control socket.

Invariants
- Every call has a deadline and stands on the wait board while it lasts.
- An error raised in the engine arrives as the same type of `rose.errors`; what cannot be asked does not reach it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from rose.errors import (
    ClusterError,
    ConfigError,
    ContractError,
    DeadlineExceeded,
    EngineError,
    RoseError,
    TransferError,
)
from rose.peer_channel import RECONNECT
from rose.proto.v1 import engine_control_pb2 as wire
from rose.proto.v1.engine_control_pb2_grpc import EngineControlStub
from rose.waits import WaitBoard
from rose_executor.control_requests import address, commit_request, stage_request
from rose_transfer.layout.layout import Layout
from rose_transfer.layout.layout_json import from_json

FAILURE_KEY = "rose-failure-bin"
STAGE_TIMEOUT_S = 600.0
_ERRORS: dict[str, type[RoseError]] = {
    kind.boundary: kind for kind in (ClusterError, ConfigError, ContractError, EngineError, TransferError)
}
_CHANNEL_OPTIONS = (
    *RECONNECT,
    # The layout of a large mixture of experts is text of several megabytes.
    ("grpc.max_receive_message_length", 256 * 2**20),
)


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """State of a live engine; `http_port` is 0 until it listens, `poisoned` says why its weights are mixed."""

    engine_id: str
    incarnation: str
    pid: int
    http_port: int
    weight_version: int
    paused: bool
    poisoned: str
    vllm_version: str


@dataclass(frozen=True, slots=True)
class Staged:
    """What staging a version took, beside generation; `encoded_bytes` of deltas, over all workers."""

    encoded_bytes: int
    verify_ms: float


@dataclass(frozen=True, slots=True)
class Committed:
    """What applying it took: `pause_ms` without any step, of which `load_ms` writing the weights."""

    pause_ms: float
    load_ms: float


class ControlClient:
    """One engine's control socket. Every method raises EngineError if the engine does not answer, and
    DeadlineExceeded if it does not answer in time; `timeout_s` is per call, but for staging, which reads a whole model.

    Raises ConfigError if the path is too long for a socket.
    """

    def __init__(self, socket_path: Path, *, engine_id: str, waits: WaitBoard, timeout_s: float = 30.0) -> None:
        if not 0 < timeout_s < math.inf:
            raise ContractError(f"a control client with timeout_s={timeout_s}", expected="a time that ends")
        self._engine_id = engine_id
        self._waits = waits
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address(socket_path), options=_CHANNEL_OPTIONS)
        self._stub: Any = EngineControlStub(self._channel)
        self._closed = False

    async def describe(self) -> EngineDescription:
        reply = await self._call("description", self._stub.Describe, wire.DescribeRequest())
        return EngineDescription(
            reply.engine_id,
            reply.incarnation,
            reply.pid,
            reply.http_port,
            reply.weight_version,
            reply.paused,
            reply.poisoned,
            reply.vllm_version,
        )

    async def layouts(self) -> tuple[Layout, ...]:
        """How the model lies in the memory of each worker: what a publisher packs for, and a receiver fetches for.

        Raises TransferError if the model cannot be updated in place.
        """
        reply = await self._call("layouts", self._stub.Layouts, wire.LayoutsRequest())
        # Megabytes of text: nothing else would run in this loop for seconds.
        reading = asyncio.to_thread(_read_all, reply.layouts)
        return await self._waits.within(reading, "layouts read", "this host", self._timeout_s, boundary="engine")

    async def stage(self, version: int, objects: Path, way: Sequence[tuple[str, bool]]) -> Staged:
        """Read and verify a way to a version beside the live weights.

        `way` names manifests in the folder `objects`, each with whether it is gone backwards, first step first.
        Raises TransferError if an object is not sound, the way does not begin at the live weights, the model cannot
        be updated in place, or this is no version or way: the engine goes on with its old version.
        """
        request = stage_request(version, objects, way)
        reply = await self._call(
            "staged version", self._stub.StageVersion, request, max(self._timeout_s, STAGE_TIMEOUT_S)
        )
        return Staged(reply.encoded_bytes, reply.verify_ms)

    async def commit(self, version: int, *, keep_kv: bool = False) -> Committed:
        """Change to the staged version between two steps; running requests go on under it.

        They recompute their context, which takes as long as a prompt of that length; or, with `keep_kv`, they go on
        with the keys and values of the old version, which no other request can read then. The token page names the
        first and the last version of each request.

        Raises TransferError if the change failed and was taken back, or this is no version: the old version goes on,
        whole. Raises EngineError if it is not staged (nothing changed) or failed half-way (`describe().poisoned`).
        """
        request = commit_request(version, keep_kv=keep_kv)
        reply = await self._call("committed version", self._stub.CommitVersion, request)
        return Committed(reply.pause_ms, reply.load_ms)

    async def apply(
        self, version: int, objects: Path, way: Sequence[tuple[str, bool]], *, keep_kv: bool = False
    ) -> Committed:
        """`stage`, then `commit`: what a `Receiver` has fetched becomes what the engine runs."""
        await self.stage(version, objects, way)
        return await self.commit(version, keep_kv=keep_kv)

    async def pause(self) -> None:
        """Stop stepping; requests keep their tokens and wait."""
        await self._call("pause", self._stub.Pause, wire.PauseRequest())

    async def resume(self) -> None:
        """Go on. Raises EngineError on a poisoned engine."""
        await self._call("resume", self._stub.Resume, wire.ResumeRequest())

    async def close(self) -> None:
        """End every call that is under way with EngineError; further ones are ContractErrors."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, what: str, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        self._raise_if_closed()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return await self._waits.within(
                method(request, timeout=timeout_s), what, self._engine_id, timeout_s, boundary="engine"
            )
        except grpc.aio.AioRpcError as error:
            raise self._translated(what, error, timeout_s) from error
        except asyncio.CancelledError:
            # A channel that closes cancels its calls, and with them, as it seems, whoever waits for one.
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise EngineError(f"{self._engine_id}: no {what}: the control client was closed") from None

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ContractError(f"the control client of {self._engine_id} is closed", expected="calls before `close`")

    def _translated(self, what: str, error: grpc.aio.AioRpcError, timeout_s: float) -> RoseError:
        for key, value in error.trailing_metadata() or ():
            if key == FAILURE_KEY and isinstance(value, bytes):
                failure = wire.Failure.FromString(value)
                kind = _ERRORS.get(failure.boundary, EngineError)
                return kind(failure.what, expected=failure.expected, to_do=failure.to_do)
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{self._engine_id}: no {what} after {timeout_s:g} s", boundary="engine")
        return EngineError(f"{self._engine_id}: no {what}: {error.code().name.lower()}: {error.details()}")


def _read_all(texts: Iterable[str]) -> tuple[Layout, ...]:
    return tuple(from_json(text) for text in texts)
