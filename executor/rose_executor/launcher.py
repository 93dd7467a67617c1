"""How an engine process comes to life: one interface over forking a warm process and spawning plainly.

Invariants
- A child leads its own session and process group; a signal goes to the whole group, and when its leader
  has ended what is left of the group is killed.
- A child dies when the process that launched it dies, even by SIGKILL, and so does all that it has started (`guard`).
- Everything a child writes goes to its log file.
- No file of the current directory can take the place of a module (`-P`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rose.errors import ClusterError, EngineError
from rose_executor.engine_env import IMPORT_ENV


class LauncherDied(EngineError):
    """What starts processes is dead itself: no restart of an engine mends that."""


@dataclass(frozen=True, slots=True)
class Command:
    """Run `python -m module *arguments` in the launcher's own environment changed by `env`: None removes."""

    module: str
    arguments: tuple[str, ...]
    log_path: Path
    cwd: Path
    env: Mapping[str, str | None] = field(default_factory=dict)


class Child(Protocol):
    """A launched process, from the side of its owner."""

    @property
    def pid(self) -> int: ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        ...

    def death(self) -> str:
        """How it ended, in words that go on from its name."""
        ...

    async def wait(self) -> int:
        """Return the exit code as soon as there is one. Has no deadline: a caller that needs one adds it."""
        ...

    def signal(self, signum: signal.Signals) -> None:
        """Send to the whole process group; nothing happens if the child has ended."""
        ...


class Launcher(Protocol):
    """What an `EngineProcess` needs to start one incarnation."""

    async def launch(self, command: Command) -> Child:
        """Raises ClusterError if there is no child afterwards, LauncherDied if there can never be one again."""
        ...


def changed(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with a command's changes made."""
    merged: dict[str, str | None] = {**environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


class SpawnedChild:
    """A child of this very process, started as `child_main`: its pid is the guard's that leads its session."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def death(self) -> str:
        return f"ended with code {self.exit_code}"

    async def wait(self) -> int:
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return code

    def signal(self, signum: signal.Signals) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)


class SpawnLauncher:
    """Start every engine as a new interpreter: the way where a GPU is present, since CUDA forbids forking.

    Costs the import of vLLM (about 13 s) at each start, where a fork of a warm process costs none.
    """

    async def launch(self, command: Command) -> SpawnedChild:
        try:
            with command.log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "rose_executor.child_main",
                    str(os.getpid()),
                    command.module,
                    *command.arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=command.cwd,
                    env=changed({**os.environ, **IMPORT_ENV}, command.env),
                    start_new_session=True,
                )
        except OSError as error:
            raise ClusterError(
                f"cannot start {command.module}: {error}",
                expected=f"a readable {command.cwd} and a writable {command.log_path}",
            ) from error
        return SpawnedChild(process)
