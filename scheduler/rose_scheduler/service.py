"""The scheduler's gRPC service: each call becomes one event, and its answer one reply; leases have a stream.

Invariants
- A message that no event can be made of is answered as malformed; it reaches neither the core nor anybody else.
- It listens on the loopback interface alone, and nobody without the token is heard; with certificates, nobody without
  one of the same authority.
- The calls under way, the size of a message and everything behind them are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from rose.access import Gate
from rose.certificates import Certificates, bind
from rose.errors import ClusterError
from rose.metrics import ADDRESS
from rose.proto.v1 import scheduler_pb2 as wire
from rose.proto.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from rose_scheduler.desk import Desk
from rose_scheduler.engines import Engine
from rose_scheduler.events import EngineBeat, EngineGone, EngineOffered
from rose_scheduler.lease_session import LeaseSession
from rose_scheduler.wire import (
    KINDS,
    STANDINGS,
    Malformed,
    beat,
    gone,
    offered,
    why_reply,
)

T = TypeVar("T")

MESSAGE_BYTES_MAX = 1 << 16
_CALLS_MAX = 1024
"""At once: no call waits for a place, but one stream of each client stays."""


class Service(SchedulerServicer):  # type: ignore[misc]
    """Answers from one desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._started_s = time.monotonic()

    async def RegisterEngine(self, request: Any, context: Any) -> Any:
        return self._engine(offered, request)

    async def Beat(self, request: Any, context: Any) -> Any:
        return self._engine(beat, request)

    async def WithdrawEngine(self, request: Any, context: Any) -> Any:
        return self._engine(gone, request)

    async def Leases(self, calls: Any, context: Any) -> Any:
        if trouble := await LeaseSession(self._desk, context.write).serve(calls):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, trouble)

    async def Status(self, request: Any, context: Any) -> Any:
        core, now = self._desk.core, time.monotonic()
        return wire.SchedulerStatus(
            engines=[_engine_status(engine, now) for engine in core.engines],
            waiting=len(core.line),
            held=len(core.leases) - len(core.line),
            trajectories=len(core.trajectories),
            groups=core.trajectories.groups,
            up_ms=(now - self._started_s) * 1000,
        )

    async def Why(self, request: Any, context: Any) -> Any:
        return why_reply(self._desk.core.why(request.some_id, time.monotonic()))

    def _engine(self, read: Callable[[Any], EngineOffered | EngineBeat | EngineGone], request: Any) -> Any:
        try:
            answer = self._desk.engine(read(request))
        except Malformed as error:
            return wire.EngineReply(standing=wire.ENGINE_STANDING_MALFORMED, what=str(error))
        return wire.EngineReply(standing=STANDINGS[answer.standing], what=answer.what)


def _engine_status(engine: Engine, now: float) -> Any:
    return wire.EngineStatus(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        kind=KINDS[engine.kind],
        address=engine.address,
        health=engine.health,
        why=engine.why,
        weight_version=engine.weight_version,
        leases=len(engine.leases),
        slots=engine.slots,
        kv_used_fraction=engine.kv_used_fraction,
        silent_ms=(now - engine.heard_s) * 1000,
    )


async def serve(
    desk: Desk, *, port: int, token: str, certificates: Certificates | None = None
) -> tuple[grpc.aio.Server, str]:
    """Answer on `port` of the loopback interface, 0 for any; the server, and its address.

    Raises ClusterError if the port is taken or may not be used.
    """
    server = grpc.aio.server(
        interceptors=[Gate(token)],
        maximum_concurrent_rpcs=_CALLS_MAX,
        options=(
            # Without it a second scheduler would share the port, and get half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ),
    )
    add_SchedulerServicer_to_server(Service(desk), server)
    try:
        bound = bind(server, f"{ADDRESS}:{port}", certificates)
    except RuntimeError as error:
        raise ClusterError(
            f"port {port} for the scheduler: {error}",
            expected="a free port on the loopback interface",
            to_do="choose another port, or 0 for any free one",
        ) from error
    await server.start()
    return server, f"{ADDRESS}:{bound}"
