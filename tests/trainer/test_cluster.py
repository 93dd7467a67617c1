"""Ray's own life and death: nothing of it outlives a run, and a run hears of its end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rose.processes import family

pytestmark = pytest.mark.timeout(240)

STARTER = """
import asyncio, os, signal, sys
from pathlib import Path
from rose.errors import ClusterError
from rose.trainer.cluster import local_cluster
from rose.waits import WaitBoard

# Not print: the signal may come while that is under way already.
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked to end\\n"))

async def works():
    print("up", flush=True)
    await asyncio.sleep(600)

async def main():
    waits = WaitBoard()
    async with local_cluster(Path(sys.argv[1]), "killed", waits, 300.0) as cluster:
        await cluster.while_alive(works())

try:
    asyncio.run(main())
except ClusterError as error:
    print(error, flush=True)
"""


@contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process that works with Ray, and everything below it."""
    process = subprocess.Popen([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    below = []
    try:
        assert process.stdout.readline() == "up\n"
        below = family(process.pid)[1:]
        yield process, below
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for one in below:
            if one.is_running():
                one.kill()


def test_nothing_of_ray_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as (process, below):
        assert {"gcs_server", "raylet"} <= {one.name() for one in below}
        process.kill()
        _, left = psutil.wait_procs(below, timeout=30)
        assert left == []


def test_a_death_of_ray_ends_the_work_with_the_cause(tmp_path: Path) -> None:
    with started(tmp_path) as (process, below):
        (raylet,) = (one for one in below if one.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
        assert "cluster: Ray is dead: raylet was killed" in said
        assert process.returncode == 0
        _, left = psutil.wait_procs(below, timeout=30)
        assert left == []


def test_signals_stay_those_of_whoever_works_with_ray(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _):
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked to end\n"
        assert process.poll() is None
