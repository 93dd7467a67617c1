"""Tells whoever samples on a lent engine what the engine counted, from its token pages, dead or alive.

Invariants
- Nobody without the token is heard (where there are certificates, nobody without one), and only on the loopback
  interface; calls and messages are bounded.
- `alive` is looked up before the page is read, so what is said of a dead incarnation is final.
- A page that cannot be read, or no longer, is not known: whoever asks keeps what was said before.
- Requests are read before the total, so the total is never less than their sum.
- Who asks about an engine hears of its end, and its last counts, where the executor itself is ended in order.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import grpc

from rose.access import Gate
from rose.certificates import Certificates, bind
from rose.engine_limits import SEQS_MAX
from rose.errors import ClusterError, EngineError
from rose.metrics import ADDRESS
from rose.proto.v1 import executor_pb2 as wire
from rose.proto.v1.executor_pb2_grpc import ExecutorServicer, add_ExecutorServicer_to_server
from rose.waits import WaitBoard
from rose_executor.page_shelf import PageShelf
from rose_executor.token_page import RequestCount

MESSAGE_BYTES_MAX = 1 << 20
_CALLS_MAX = 256
REQUESTS_MAX = SEQS_MAX
"""In one question: no engine has more at once, and looking them up holds up the loop that keeps the quota."""
QUIET_S = 2.0
"""Whoever samples asks about once a second until it knows that the engine is dead: after that long nobody does."""
LAST_WORDS_S = 6.0


class CountsService(ExecutorServicer):  # type: ignore[misc]
    """Answers from a shelf; `alive` says of an incarnation whether it may still generate."""

    def __init__(self, shelf: PageShelf, alive: Callable[[str], bool]) -> None:
        self._shelf = shelf
        self._alive = alive

    async def Counts(self, request: Any, context: Any) -> Any:
        alive = self._alive(request.incarnation)
        page = self._shelf.page(request.incarnation)
        if page is None:
            return wire.CountsReply()
        if len(request.request_ids) > REQUESTS_MAX:
            what = f"{len(request.request_ids)} requests in one question, at most {REQUESTS_MAX} are answered"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        try:
            requests, total = page.requests(request.request_ids), self._shelf.tokens(request.incarnation)
        except EngineError:
            return wire.CountsReply()
        return wire.CountsReply(
            known=True,
            alive=alive,
            total_tokens=total,
            requests=[_message(request_id, count) for request_id, count in requests.items()],
        )


class Questions:
    """Passes on the `alive` of a service, and so knows when it was asked last."""

    def __init__(self, alive: Callable[[str], bool]) -> None:
        self._alive = alive
        self._asked_s = -math.inf

    def alive(self, incarnation: str) -> bool:
        self._asked_s = time.monotonic()
        return self._alive(incarnation)

    async def over(self, waits: WaitBoard) -> None:
        """Return once nobody has asked for `QUIET_S`, or after `LAST_WORDS_S`."""
        until_s = time.monotonic() + LAST_WORDS_S
        with waits.waiting("last questions", "whoever samples", LAST_WORDS_S):
            while (left_s := min(until_s, self._asked_s + QUIET_S) - time.monotonic()) > 0:
                await asyncio.sleep(left_s)


def _message(request_id: str, count: RequestCount) -> Any:
    return wire.RequestCount(
        request_id=request_id,
        tokens=count.tokens,
        finished=count.finished,
        first_version=count.first_version,
        last_version=count.last_version,
    )


async def serve_counts(
    shelf: PageShelf, alive: Callable[[str], bool], *, port: int, token: str, certificates: Certificates | None = None
) -> tuple[grpc.aio.Server, str]:
    """Answer on `port` of the loopback interface, 0 for any; the server, and its address.

    Raises ClusterError if the port is taken or may not be used.
    """
    server = grpc.aio.server(
        interceptors=[Gate(token)],
        maximum_concurrent_rpcs=_CALLS_MAX,
        # Without the first a second executor would share the port, and get half of the calls.
        options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)),
    )
    add_ExecutorServicer_to_server(CountsService(shelf, alive), server)
    try:
        bound = bind(server, f"{ADDRESS}:{port}", certificates)
    except RuntimeError as error:
        raise ClusterError(
            f"port {port} for the counts: {error}",
            expected="a free port on the loopback interface",
            to_do="choose another port, or 0 for any free one",
        ) from error
    await server.start()
    return server, f"{ADDRESS}:{bound}"
