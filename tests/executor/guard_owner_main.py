"""A starter for tests of its death: spawns one guarded family, says the leader's pid, and sleeps."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rose_executor.launcher import Command, SpawnLauncher


async def main(folder: Path) -> None:
    family = Command("guarded_family_main", (str(folder), "sleep"), folder / "log", Path(__file__).parent)
    child = await SpawnLauncher().launch(family)
    (folder / "leader").write_text(str(child.pid))
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
