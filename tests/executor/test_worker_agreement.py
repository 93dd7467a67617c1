"""Workers of an engine wait for each other by name, and not for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKERS = """
import os, sys
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

from rose.errors import EngineError
from rose_executor.worker_agreement import Told, exchange

over_read, over_write = os.pipe()
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=8))
worker = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=group)
assert exchange([Told(f"from {rank}", None)], worker) == [Told("from 0", None), Told("from 1", None)]
os.close(over_write if rank else over_read)
if rank:
    os.read(over_read, 1)  # hangs until the other one is over
    os._exit(0)
try:
    exchange([Told("", None)], worker)
except EngineError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.timeout(120)
def test_a_worker_that_hangs_is_told_by_those_who_wait_for_it(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WORKERS, str(tmp_path / "meeting")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("engine: worker 0 of 2: not all others have said how their part of the weight")
    assert "see the logs of the other workers for the one that hangs" in ended.stdout
