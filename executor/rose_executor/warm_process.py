"""A process that has imported vLLM once, owned by this one; engines are forked from it in seconds.

Invariants
- Every child's end is reported exactly once, through its own `wait`; if the warm process dies, once that is gone too.
- The warm process and all its children end when it is closed, when it is killed, or when its owner dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.errors import ClusterError
from rose.waits import WaitBoard
from rose_executor.child_log import ChildLog
from rose_executor.engine_env import IMPORT_ENV
from rose_executor.launcher import Command, LauncherDied

# What an API server, an engine core and an in-process engine import only when they run: paid for once, here.
ENGINE_MODULES = (
    "rose_executor.engine_main",
    "rose_executor.fresh_probe_main",
    "rose_executor.control_server",
    "rose_executor.counting_scheduler",
    "rose_executor.weight_worker",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.serve.sagemaker.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)

_FORK_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 10.0


class WarmChild:
    """One fork of the warm process, seen from the owner."""

    def __init__(self, warm: WarmProcess, pid: int) -> None:
        self._warm = warm
        self._pid = pid
        self._lost = False
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def exit_code(self) -> int | None:
        return self._exit.result() if self._exit.done() else None

    def death(self) -> str:
        return "died with the warm process" if self._lost else f"ended with code {self.exit_code}"

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def signal(self, signum: signal.Signals) -> None:
        if not self._exit.done():
            # A child of a dead warm process is dying with it.
            with contextlib.suppress(LauncherDied):
                self._warm.send({"signal": self._pid, "signum": int(signum)})

    def ended(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    def lost(self) -> None:
        """The warm process is gone, and took it along."""
        self._lost = not self._exit.done()
        self.ended(-signal.SIGKILL)


class WarmProcess:
    """Owner's side. Made by `start`; implements `rose_executor.launcher.Launcher`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: ChildLog,
        waits: WaitBoard,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log = log
        self._waits = waits
        self._ids = itertools.count()
        self._replies: dict[int, asyncio.Future[WarmChild]] = {}
        self._children: dict[int, WarmChild] = {}
        self._closed = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen(), name="warm process")

    @classmethod
    async def start(
        cls,
        waits: WaitBoard,
        *,
        log_path: Path,
        env: Mapping[str, str] = IMPORT_ENV,
        modules: Sequence[str] = ENGINE_MODULES,
        timeout_s: float = 180.0,
        born: Callable[[int], None] = lambda pid: None,
    ) -> WarmProcess:
        """Import `modules` in a new process (vLLM: about 15 s of one core) and return when it can fork.

        `env` must hold everything that they read while they are imported. Call from the main thread, which
        must outlive it. `born` is told its pid before it has done anything. Raises LauncherDied with the log's last
        lines if it dies, DeadlineExceeded after `timeout_s`.
        """
        ours, theirs = socket.socketpair()
        child_log = ChildLog(log_path)
        with theirs, log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # No file of the current directory may take the place of a module.
                "-P",
                "-m",
                "rose_executor.warm_main",
                str(os.getpid()),
                str(theirs.fileno()),
                *modules,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            born(process.pid)
        except BaseException:
            process.kill()
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        warm = cls(process, reader, writer, child_log, waits)
        try:
            await waits.within(
                asyncio.shield(warm._ready),
                "warm process start",
                "warm process",
                timeout_s,
                boundary="engine",
                to_do=f"see {log_path}",
            )
        except BaseException:
            await warm.close()
            raise
        return warm

    @property
    def pid(self) -> int:
        return self._process.pid

    async def launch(self, command: Command) -> WarmChild:
        """Fork a child that becomes `command`; one that nobody waits for any more is ended.

        Raises ClusterError if the fork was refused, LauncherDied if the warm process is dead.
        """
        if self._writer.is_closing():
            # How it ended is known in a moment.
            with self._waits.waiting("news of its end", "warm process", _CLOSE_TIMEOUT_S):
                await asyncio.wait([self._listener], timeout=_CLOSE_TIMEOUT_S)
        key = next(self._ids)
        reply: asyncio.Future[WarmChild] = asyncio.get_running_loop().create_future()
        self._replies[key] = reply
        fork = {
            "module": command.module,
            "arguments": command.arguments,
            "env": dict(command.env),
            "cwd": str(command.cwd),
            "log_path": str(command.log_path),
        }
        try:
            self.send({"id": key, "fork": fork})
            return await self._waits.within(
                reply, "fork", "warm process", _FORK_TIMEOUT_S, boundary="engine", to_do=f"see {self._log.path}"
            )
        except BaseException:
            # Whoever asked may have been cancelled, or late, between the answer and its own next turn.
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                reply.result().signal(signal.SIGKILL)
            raise
        finally:
            del self._replies[key]

    async def close(self) -> None:
        """End the warm process and every child, and wait until it is gone. Without a child it is not asked first."""
        self._closed = True
        self._ready.cancel()
        if not self._children:
            self._kill()
        self._writer.close()
        await self._listener

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message. Raises LauncherDied if the warm process is dead or closed."""
        if self._listener.done() or self._writer.is_closing():
            raise self._dead()
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _dead(self) -> LauncherDied:
        code = self._process.returncode
        if self._closed or code is None:
            what = "the warm process is closed"
        elif code < 0:
            what = f"the warm process died (signal {-code})"
        else:
            what = f"the warm process ended with code {code}{self._log.last_words()}"
        return LauncherDied(what, to_do=f"see {self._log.path}")

    async def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                self._receive(json.loads(line))
        self._writer.close()
        try:
            await self._until_gone()
        finally:
            for child in self._children.values():
                child.lost()
            waiting: list[asyncio.Future[Any]] = [self._ready, *self._replies.values()]
            for future in waiting:
                if not future.done():
                    future.set_exception(self._dead())

    async def _until_gone(self) -> None:
        """By its own will, else by force."""
        try:
            await self._waits.within(
                self._process.wait(), "warm process end", "warm process", _CLOSE_TIMEOUT_S, boundary="engine"
            )
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _receive(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready.set_result(None)
        elif "exited" in message:
            self._children.pop(message["exited"]).ended(message["code"])
        else:
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        reply = self._replies.get(message["id"])
        wanted = reply is not None and not reply.done()
        if "error" in message:
            if reply is not None and wanted:
                reply.set_exception(ClusterError(f"the warm process could not fork: {message['error']}"))
            return
        # Made before any other message is read: the child's end may be the very next one.
        child = self._children[message["pid"]] = WarmChild(self, message["pid"])
        if reply is not None and wanted:
            reply.set_result(child)
        else:
            child.signal(signal.SIGKILL)
