"""An executor for tests of its death: places a guest that nobody guards, says both pids, and sleeps or dies at once.

Arguments: a folder, "groups" or "threads", and any of "frozen" and "dies".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rose_executor.partition_terms import Role
from rose_executor.partition_threads import ThreadPartitioner
from rose_executor.partitioner import Partitioner, pick_partitioner

# Two processes, one of which has left the session; both are deaf.
_GUEST = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
os.write(1, b"%d\n" % os.getpid())
while True:
    time.sleep(0.01)
"""

if __name__ == "__main__":
    folder, kind, *how = Path(sys.argv[1]), *sys.argv[2:]
    partitioner: Partitioner = ThreadPartitioner([], "a test") if kind == "threads" else pick_partitioner()
    guest = subprocess.Popen([sys.executable, "-c", _GUEST], stdout=subprocess.PIPE, start_new_session=True)
    assert guest.stdout is not None
    pids = {int(guest.stdout.readline()) for _ in range(2)}
    partitioner.place(guest.pid, Role.GUEST)
    if "frozen" in how:
        partitioner.freeze()
    text = " ".join(map(str, [partitioner.describe().name.split()[0], *pids]))
    (folder / "placed.part").write_text(text)
    (folder / "placed.part").rename(folder / "placed")
    if "dies" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
