"""An engine's control socket: gRPC on a unix domain socket, inside vLLM's API server process.

Loaded by vLLM through the entry point `vllm.endpoint_plugins`. It adds no HTTP route; vLLM's own
development routes, which could do some of this without any authorisation, stay off.

Invariants
- The socket is readable and writable by its owner alone from the moment it exists, and appears under its name
  only when it answers.
- The engine's weight version is named before the first request can arrive.
- When the engine core is lost, so is this process.
- Staging and committing exclude one another, also where a caller has given up meanwhile; a commit is refused unless
  exactly that version is staged.
"""

from __future__ import annotations

import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import psutil

from rose.errors import EngineError, RoseError, TransferError
from rose.proto.v1 import engine_control_pb2 as wire
from rose.proto.v1.engine_control_pb2_grpc import EngineControlServicer, add_EngineControlServicer_to_server
from rose_executor import vllm_030, vllm_contract, vllm_reliances
from rose_executor.control_requests import address
from rose_executor.engine_env import EngineEnv

T = TypeVar("T")

FAILURE_KEY = "rose-failure-bin"
_STAGE_POLL_S = 0.005
_CORE_POLL_S = 0.05


class ControlServicer(EngineControlServicer):  # type: ignore[misc]
    """Answers by asking the engine core; `core` is vLLM's `AsyncMPClient`."""

    def __init__(self, env: EngineEnv, core: Any, vllm_version: str) -> None:
        self._env = env
        self._vllm_version = vllm_version
        self._core = core
        self._update = asyncio.Lock()
        self._working: set[asyncio.Future[Any]] = set()

    async def Describe(self, request: Any, context: Any) -> Any:
        state = await self._ask(context, "rose_describe")
        return wire.EngineDescription(
            engine_id=self._env.engine_id,
            incarnation=self._env.incarnation,
            pid=os.getpid(),
            http_port=listening_port(),
            weight_version=state["version"],
            paused=state["paused"],
            poisoned=state["poisoned"],
            vllm_version=self._vllm_version,
        )

    async def Layouts(self, request: Any, context: Any) -> Any:
        workers = await self._ask(context, "rose_layouts")
        for worker in workers:
            if worker["error"]:
                await fail(context, TransferError(worker["error"]))
        return wire.LayoutsReply(layouts=[worker["layout"] for worker in workers])

    async def StageVersion(self, request: Any, context: Any) -> Any:
        return await self._to_its_end(self._stage(request, context))

    async def CommitVersion(self, request: Any, context: Any) -> Any:
        return await self._to_its_end(self._commit(request, context))

    async def _stage(self, request: Any, context: Any) -> Any:
        async with self._update:
            way = [(step.manifest, step.backwards) for step in request.way]
            await self._ask(context, "rose_stage", request.version, request.objects, way)
            while True:
                workers = await self._ask(context, "rose_staged")
                if None not in workers:
                    break
                await asyncio.sleep(_STAGE_POLL_S)
        for worker in workers:
            if worker["error"]:
                await fail(context, TransferError(f"version {request.version} is refused: {worker['error']}"))
        return wire.StageVersionReply(
            encoded_bytes=sum(worker["bytes"] for worker in workers),
            verify_ms=max(worker["verify_ms"] for worker in workers),
        )

    async def _commit(self, request: Any, context: Any) -> Any:
        async with self._update:
            done = await self._ask(context, "rose_commit", request.version, request.keep_kv)
        if done["undone"]:
            await fail(context, TransferError(f"version {request.version} was taken back: {done['undone']}"))
        return wire.CommitVersionReply(pause_ms=done["pause_ms"], load_ms=done["load_ms"])

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which goes on and keeps others out also where its caller has given up."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            # Told to the caller, if there still is one.
            task.exception()

    async def Pause(self, request: Any, context: Any) -> Any:
        await self._ask(context, "pause_scheduler", "keep", False)
        return wire.PauseReply()

    async def Resume(self, request: Any, context: Any) -> Any:
        await self._ask(context, "rose_resume")
        return wire.ResumeReply()

    async def _ask(self, context: Any, method: str, *args: Any) -> Any:
        return await answered(context, self._core.call_utility_async(method, *args))


async def answered(context: Any, call: Awaitable[T]) -> T:
    """Await a call to the engine core; its failure becomes the failure of the RPC."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - vLLM answers a plain Exception with the text of the cause
        await fail(context, EngineError(str(error)))


async def fail(context: Any, error: RoseError) -> NoReturn:
    """End an RPC with an error of ours, whole, in its trailing metadata."""
    failure = wire.Failure(boundary=error.boundary, what=error.what, expected=error.expected, to_do=error.to_do)
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        str(error),
        trailing_metadata=((FAILURE_KEY, failure.SerializeToString()),),
    )
    raise error


def listening_port() -> int:
    """The TCP port that this process listens on, 0 before it does."""
    for connection in psutil.Process().net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN:
            return int(connection.laddr.port)
    return 0


async def serve(env: EngineEnv, core: Any, vllm_version: str) -> grpc.aio.Server:
    """Name the version loaded at start, then open the socket. Raises EngineError if it cannot be bound."""
    await core.call_utility_async("rose_loaded", env.weight_version)
    server = grpc.aio.server()
    add_EngineControlServicer_to_server(ControlServicer(env, core, vllm_version), server)
    draft = env.control_socket.with_name(f".{env.control_socket.name}")
    bind(server, draft)
    await server.start()
    draft.rename(env.control_socket)
    return server


def bind(server: grpc.aio.Server, path: Path) -> None:
    old = os.umask(0o177)
    try:
        server.add_insecure_port(address(path))
    except RuntimeError as error:
        raise EngineError(f"cannot open the control socket {path}: {error}") from error
    finally:
        os.umask(old)


async def end_with_core(engine_client: Any) -> None:
    """End this process as soon as the engine core is lost.

    vLLM itself looks every five seconds, and until then answers every new request with an error.
    """
    while not engine_client.errored:
        await asyncio.sleep(_CORE_POLL_S)
    signal.raise_signal(signal.SIGTERM)


class ControlPlugin:
    """vLLM's `EndpointPlugin` protocol."""

    name = "rose"
    required_tasks = None

    def __init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        """No routes: what controls an engine is not reachable over its HTTP port."""

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        env = EngineEnv.read()
        if env is not None and engine_client is not None:
            import vllm

            vllm_contract.check(vllm_reliances.SERVER)
            vllm_030.level_server()
            self._server = await serve(env, engine_client.engine_core, vllm.__version__)
            self._watch = asyncio.create_task(end_with_core(engine_client), name="engine core watch")
