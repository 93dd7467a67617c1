"""One process of the demo, as the director sees it.

Invariants
- A child leads its own session, so that Ctrl-C reaches the director alone, who ends them in the right order.
- It dies with the director, even by SIGKILL, and all that it has started dies with it.
- It is placed before it has done anything worth mentioning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose.errors import ClusterError, DeadlineExceeded
from rose.waits import WaitBoard
from rose_executor.child_log import ChildLog
from rose_executor.launcher import SpawnedChild, changed

_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Program:
    """`python -m module *arguments` in the director's environment changed by `env`, where None removes.

    `name` is what status and errors call it. What it writes goes to `log_path`, or where the director's own goes.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    log_path: Path | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)


class DemoChild:
    """A started program. Made by `start_child`."""

    def __init__(self, program: Program, process: SpawnedChild, log: ChildLog | None, waits: WaitBoard) -> None:
        self.program = program
        self._process = process
        self._log = log
        self._waits = waits

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        """Of the leader of its session; what the program tells of itself has another."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        return self._process.exit_code

    async def wait(self) -> int:
        """The exit code, once there is one. Watches, so no deadline."""
        return await self._process.wait()

    def death(self) -> str:
        """How it ended and its last words, to be put behind its name."""
        code = self.exit_code
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        return how + (self._log.last_words() if self._log is not None else "")

    def send(self, signum: signal.Signals) -> None:
        """To its process group, if it still runs."""
        self._process.signal(signum)

    async def stop(self, grace_s: float, signum: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end; after `grace_s` by force. Does nothing once it has ended.

        Raises DeadlineExceeded if it survives SIGKILL.
        """
        if self.exit_code is not None:
            return
        self.send(signum)
        with contextlib.suppress(DeadlineExceeded):
            await self._ended(grace_s)
        if self.exit_code is None:
            self.send(signal.SIGKILL)
            await self._ended(_KILL_TIMEOUT_S)

    async def _ended(self, timeout_s: float) -> None:
        await self._waits.within(self.wait(), "end", self.name, timeout_s, boundary="cluster")


async def start_child(program: Program, place: Callable[[int], None], waits: WaitBoard) -> DemoChild:
    """Start a program and place it. Raises ClusterError if that cannot be, and nothing is left of it then.

    Main thread only: the child dies with the thread that starts it.
    """
    log = None if program.log_path is None else ChildLog(program.log_path)
    process = await _spawned(program)
    child = DemoChild(program, process, log, waits)
    try:
        place(process.pid)
    except ClusterError as error:
        await child.stop(0.0, signal.SIGKILL)
        raise ClusterError(f"{program.name} {child.death()}, and was not placed: {error.what}") from error
    return child


async def _spawned(program: Program) -> SpawnedChild:
    command = (sys.executable, "-P", "-m", "rose_executor.child_main", str(os.getpid()), program.module)
    with contextlib.ExitStack() as stack:
        try:
            log = None if program.log_path is None else stack.enter_context(program.log_path.open("ab"))
            process = await asyncio.create_subprocess_exec(
                *command,
                *program.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=changed(os.environ, program.env),
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"{program.name} cannot be started: {error}") from error
    return SpawnedChild(process)
