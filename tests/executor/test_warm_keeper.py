"""A warm process that dies is replaced once, for all who ask; the next death is final."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from rose.waits import WaitBoard
from rose_executor.launcher import Command, LauncherDied
from rose_executor.warm_keeper import WarmKeeper
from rose_executor.warm_process import WarmProcess

DEADLINE_S = 20.0


def test_a_dead_warm_process_is_replaced_once(tmp_path: Path) -> None:
    command = Command("json.tool", ("--help",), tmp_path / "child.log", tmp_path)

    async def run() -> None:
        start = partial(WarmProcess.start, WaitBoard(), log_path=tmp_path / "warm.log", modules=("json",))
        keeper = await WarmKeeper.start(start)
        try:
            first = keeper.pid
            os.kill(first, signal.SIGKILL)
            children = await asyncio.gather(*(keeper.launch(command) for _ in range(3)))
            assert keeper.pid != first
            async with asyncio.timeout(DEADLINE_S):
                assert [await child.wait() for child in children] == [0, 0, 0]
            os.kill(keeper.pid, signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(LauncherDied, match=r"the warm process died \(signal 9\)"):
                    await keeper.launch(command)
        finally:
            await keeper.close()

    asyncio.run(run())
