"""A warm process that is replaced when it is found dead, a limited number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rose.logs import logger
from rose_executor.launcher import Command, LauncherDied
from rose_executor.warm_process import WarmChild, WarmProcess

log = logger("warm process")


class WarmKeeper:
    """Made by `start`; implements `rose_executor.launcher.Launcher`."""

    def __init__(self, start_one: Callable[[], Awaitable[WarmProcess]], warm: WarmProcess, restarts_left: int) -> None:
        self._start_one = start_one
        self._warm = warm
        self._restarts_left = restarts_left
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, start_one: Callable[[], Awaitable[WarmProcess]], restarts_max: int = 1) -> WarmKeeper:
        """`start_one` is `WarmProcess.start` with its arguments; raises what it raises."""
        return cls(start_one, await start_one(), restarts_max)

    @property
    def pid(self) -> int:
        """Of the current warm process."""
        return self._warm.pid

    async def launch(self, command: Command) -> WarmChild:
        """As `WarmProcess.launch`; takes as long as a start of the warm process longer if that has died.

        Raises LauncherDied if it died once more than it may, and what its start raises.
        """
        warm = self._warm
        try:
            return await warm.launch(command)
        except LauncherDied as died:
            await self._replace(warm, died)
        return await self._warm.launch(command)

    async def close(self) -> None:
        """End the warm process and every child, and wait until it is gone."""
        await self._warm.close()

    async def _replace(self, dead: WarmProcess, died: LauncherDied) -> None:
        """Only the first of those who find it dead starts another; the others wait for that."""
        async with self._lock:
            if self._warm is not dead:
                return
            if self._restarts_left == 0:
                raise died
            self._restarts_left -= 1
            log.warning("another is started", why=died.what)
            self._warm = await self._start_one()
