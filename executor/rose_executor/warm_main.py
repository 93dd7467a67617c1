"""The warm process itself: imports vLLM once, then forks a child for each command it reads.

Invariants
- One thread, and no socket but the pair shared with its owner: a fork of it is a clean start.
- Children are reaped here and nowhere else, so a process id in the table is never a stranger's.
- When the owner is gone (end of file on the pair, or its death) this process ends, and with it every child.

Messages are JSON lines. From the owner: {"id", "fork": {...}} and {"signal": pid, "signum": n}.
To the owner: {"ready": true}, {"id", "pid"} or {"id", "error"}, and {"exited": pid, "code": n}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rose.processes import become_subreaper, die_with_parent
from rose_executor.child_main import run_module
from rose_executor.launcher import changed


def import_all(modules: Sequence[str]) -> None:
    """Import what a child would; then keep the collector from touching (and so copying) shared pages."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def fork_where_vllm_would_spawn() -> None:
    """Keep vLLM's CPU build from starting new interpreters that import everything again.

    It spawns its engine core, and looks at an unknown model's class in a subprocess; both only matter
    where CUDA could be initialised by accident.
    """
    if "vllm" not in sys.modules:
        return
    context = multiprocessing.get_context("fork")
    original = importlib.import_module("vllm.utils.system_utils").get_mp_context

    def get_mp_context() -> Any:
        return context

    def run_here(fn: Callable[[], Any]) -> Any:
        return fn()

    for module in list(sys.modules.values()):
        # Through the dictionary: asking a lazy package for an attribute would import half of it.
        names = vars(module)
        if names.get("get_mp_context") is original:
            names["get_mp_context"] = get_mp_context
    vars(importlib.import_module("vllm.model_executor.models.registry"))["_run_in_subprocess"] = run_here


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


class WarmServer:
    """The loop of the warm process."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner, selectors.EVENT_READ)
        self._children: dict[int, int] = {}
        self._buffer = b""

    def serve(self) -> None:
        """Return when the owner has closed its end."""
        self._send({"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._owner:
                    if not self._read():
                        return
                else:
                    self._reap(key.data)

    def _read(self) -> bool:
        data = self._owner.recv(65_536)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "fork" in message:
                self._send({"id": message["id"], **self._fork(message["fork"])})
            elif message["signal"] in self._children:
                signal_group(message["signal"], message["signum"])
        return bool(data)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._owner.sendall(json.dumps(message).encode() + b"\n")

    def _fork(self, command: dict[str, Any]) -> dict[str, Any]:
        if thread_count() != 1:
            return {"error": f"the warm process has {thread_count()} threads; forking it would not be safe"}
        try:
            log = os.open(command["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            return {"error": f"cannot open the log: {error}"}
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(log)
            return {"error": str(error)}
        if pid == 0:
            self._become_child(parent, command, log)
        os.close(log)
        pidfd = os.pidfd_open(pid)
        self._children[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        return {"pid": pid}

    def _become_child(self, parent: int, command: dict[str, Any], log: int) -> None:
        code = 1
        try:
            os.setsid()
            self._selector.close()
            self._owner.close()
            for pidfd in self._children.values():
                os.close(pidfd)
            os.dup2(log, 1)
            os.dup2(log, 2)
            environ = changed(os.environ, command["env"])
            os.environ.clear()
            os.environ.update(environ)
            tempfile.tempdir = None  # Decided again, by the child's own TMPDIR.
            os.chdir(command["cwd"])
            fork_where_vllm_would_spawn()
            code = run_module(parent, command["module"], command["arguments"])
        except BaseException:  # noqa: BLE001 - the loop of the parent must not go on in the child
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self, pid: int) -> None:
        code = end_group(pid)
        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._send({"exited": pid, "code": code})

    def end_all(self) -> None:
        for pid in self._children:
            end_group(pid)


def signal_group(leader: int, signum: int) -> None:
    """Signal a child that is not reaped yet, and its whole group."""
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        # Just forked: it has not become the leader of a group of its own yet.
        os.kill(leader, signum)


def end_group(leader: int) -> int:
    """Kill and reap a whole process group of ours; return its leader's exit code (as `Child.exit_code`)."""
    signal_group(leader, signal.SIGKILL)
    _, status = os.waitpid(leader, 0)
    # The leader's own children were handed to this process when it ended, before it could be reaped.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-leader, 0)
    return os.waitstatus_to_exitcode(status)


def main(owner_pid: int, owner_fd: int, modules: Sequence[str]) -> None:
    die_with_parent(owner_pid)
    become_subreaper()
    owner = socket.socket(fileno=owner_fd)
    owner.set_inheritable(False)
    os.chdir(Path("/"))
    import_all(modules)
    server = WarmServer(owner)
    try:
        server.serve()
    finally:
        server.end_all()
        # Interpreter teardown would only free what the kernel frees faster.
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
