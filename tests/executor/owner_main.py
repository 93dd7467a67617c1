"""An owner for tests of its death: starts a light warm process and one family, then sleeps."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from rose.waits import WaitBoard
from rose_executor.launcher import Command
from rose_executor.warm_process import WarmProcess


async def main(folder: Path) -> None:
    warm = await WarmProcess.start(
        WaitBoard(), log_path=folder / "warm.log", env={"PYTHONPATH": str(Path(__file__).parent)}, modules=("json",)
    )
    await warm.launch(Command("family_main", (str(folder),), folder / "child.log", folder))
    (folder / "warm").write_text(str(warm.pid))
    (folder / "owner").write_text(str(os.getpid()))
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
