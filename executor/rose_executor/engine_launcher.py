"""Which way engines come to life on this machine, and who is told of each process before it has done anything."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from rose.machine import look
from rose.waits import WaitBoard
from rose_executor.launcher import Child, Command, Launcher, SpawnLauncher
from rose_executor.warm_keeper import WarmKeeper
from rose_executor.warm_process import WarmProcess

OpenLauncher = Callable[[WaitBoard, Path, float], AbstractAsyncContextManager[Launcher]]
"""Opens what starts engines, given the waits, its log file and the longest time it may take to be ready."""


def _nobody(pid: int) -> None:
    pass


@contextlib.asynccontextmanager
async def open_launcher(
    waits: WaitBoard, log_path: Path, timeout_s: float, born: Callable[[int], None] = _nobody
) -> AsyncIterator[Launcher]:
    """Engines fork from a warm process on CPU; a fork is unsafe once CUDA runs, so they are spawned beside a GPU.

    `born` is told the pid of the warm process and of every child; where it raises, that process is ended.
    """
    if look().gpus:
        yield Midwife(SpawnLauncher(), born)
        return
    warm = await WarmKeeper.start(partial(WarmProcess.start, waits, log_path=log_path, timeout_s=timeout_s, born=born))
    try:
        yield Midwife(warm, born)
    finally:
        await warm.close()


class Midwife:
    """A launcher that tells of every child before its owner has it."""

    def __init__(self, launcher: Launcher, born: Callable[[int], None]) -> None:
        self._launcher = launcher
        self._born = born

    async def launch(self, command: Command) -> Child:
        """As the launcher's own; raises what `born` raises, with no child left."""
        child = await self._launcher.launch(command)
        try:
            self._born(child.pid)
        except BaseException:
            child.signal(signal.SIGKILL)
            raise
        return child
