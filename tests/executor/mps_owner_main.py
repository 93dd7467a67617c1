"""An executor for tests of its death under MPS: starts a guarded guest as the agent does, says its pids, and sleeps.

Arguments: a folder, the serving engine's pid, the guest's module, and "frozen" or nothing. The guest's work goes to
`guest` in the folder, its guard's pid to `placed`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rose_executor.launcher import Command, SpawnLauncher
from rose_executor.mps_preflight import compute_modes, find_daemon
from rose_executor.partition_mps import MpsPartitioner
from rose_executor.partition_terms import GuestLimits, Role
from rose_executor.partitioner import pick_on_gpu


async def main(folder: Path, serving: int, module: str, *how: str) -> None:
    partitioner = pick_on_gpu([], GuestLimits(share=0.5), lambda: [serving], compute_modes(), find_daemon)
    assert isinstance(partitioner, MpsPartitioner)
    command = Command(module, (str(folder / "guest"),), folder / "log", folder, partitioner.guest_env())
    child = await SpawnLauncher().launch(command)
    partitioner.place(child.pid, Role.GUEST)
    while not (folder / "guest").exists() or not (folder / "guest").read_text():
        await asyncio.sleep(0.02)
    if how:
        partitioner.freeze()
    (folder / "placed.part").write_text(str(child.pid))
    (folder / "placed.part").rename(folder / "placed")
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
