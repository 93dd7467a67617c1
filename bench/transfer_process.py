"""The processes at the ends of the link, and how the bench speaks with them: a question, an answer, one at a time.

A question names a method of the other side's object and has its arguments. A process whose bench is gone ends by
itself: the connection tells. What it writes to temporary folders is removed when it is closed, however it ended.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from bench.link import End
from bench.registry import BenchFailed
from bench.result import ROOT
from rose.errors import RoseError

END_TIMEOUT_S = 10.0


class EndProcess:
    """`python -m MODULE FD ARGUMENTS`, running at `end` of the link; `name` is what errors call it."""

    def __init__(self, name: str, end: End, module: str, arguments: Sequence[str] = ()) -> None:
        self.name = name
        self._connection, other = Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="rose-bench-")
        command = [sys.executable, "-m", module, str(other.fileno()), *arguments]
        # Gloo finds its interface by the first; the second keeps it from warning that an address has no name here.
        gloo = {"GLOO_SOCKET_IFNAME": end.interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            end.command(*command),
            cwd=ROOT,
            env=os.environ | gloo | {"TMPDIR": self._folder.name},
            stdin=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
        )
        other.close()

    def tell(self, method: str, *arguments: Any) -> None:
        """Ask something whose answer is fetched later. Raises BenchFailed if the process has ended."""
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._failed(method, "it has ended") from error

    def answer(self, method: str, timeout_s: float) -> Any:
        """The answer to what was told. Raises BenchFailed if it is an error, or none comes in time."""
        try:
            if not self._connection.poll(timeout_s):
                raise self._failed(method, f"no answer after {timeout_s:g} s")
            value, problem = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._failed(method, "it has ended") from error
        if problem:
            raise self._failed(method, problem)
        return value

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        self.tell(method, *arguments)
        return self.answer(method, timeout_s)

    def close(self) -> None:
        """The process sees the end of the connection; if it does not end then, it is ended."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _failed(self, method: str, why: str) -> BenchFailed:
        return BenchFailed(f"the {self.name} could not {method}: {why}", to_do="see what it printed above")


def serve(served: object) -> None:
    """Answer questions with the coroutine methods of `served` until the asker is gone."""
    connection = Connection(int(sys.argv[1]))
    with suppress(KeyboardInterrupt):  # the bench that started this one has got it as well, and sees to the end
        asyncio.run(_answer_all(connection, served))


async def _answer_all(connection: Connection, served: object) -> None:
    while True:
        try:
            method, arguments = await asyncio.to_thread(connection.recv)
        except (EOFError, OSError):
            return
        try:
            reply = await getattr(served, method)(*arguments), ""
        except (RoseError, OSError, ValueError, RuntimeError, ExceptionGroup) as error:
            reply = None, _words(error)
        with suppress(OSError):
            connection.send(reply)


def _words(error: Exception) -> str:
    if isinstance(error, ExceptionGroup):
        return "; ".join(map(_words, error.exceptions))
    return str(error) or repr(error)
