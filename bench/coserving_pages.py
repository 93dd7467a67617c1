"""How long a guest's pages take to go back to the kernel, by the product's own way: half a cache, blocks at random.

`large` blocks have 128 KiB in each layer, as those of a model of seven billion parameters; `small` ones 16 KiB, as
those of the bench's guest. What went is seen in the process's resident memory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from statistics import median

from bench.registry import BenchFailed
from bench.result import ROOT, Run

CACHE_BYTES = 1 << 30
LAYERS = 8
LANE_BYTES = {"large": 128 << 10, "small": 16 << 10}
REPEATS = 5
_TIMEOUT_S = 300.0
_GONE_AT_LEAST = 0.9


def pages_figures() -> Run:
    """In a process of its own. Raises BenchFailed if pages did not go."""
    command = [sys.executable, "-m", "bench.coserving_pages"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise BenchFailed(f"pages could not be given back: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return {
        "pages_back_ms_per_gib": found["large"],
        "pages_back_small_ms_per_gib": found["small"],
    }


def _ms_per_gib(lane_bytes: int, seed: int) -> float:
    import psutil
    import torch

    from rose_executor.kv_tensors import memory_of, runs_of

    blocks = CACHE_BYTES // LAYERS // lane_bytes
    tensors = [torch.ones(blocks, lane_bytes // 4) for _ in range(LAYERS)]
    memory = memory_of(tensors, blocks)
    chosen = sorted(random.Random(seed).sample(range(blocks), blocks // 2))
    process = psutil.Process()
    before = process.memory_info().rss
    began_s = time.perf_counter()
    given = memory.give_back(runs_of(chosen))
    took_s = time.perf_counter() - began_s
    gone = before - process.memory_info().rss
    if gone < _GONE_AT_LEAST * given:
        raise BenchFailed(f"{given} bytes were given back, and {gone} of them went")
    return 1e3 * took_s / (given / 2**30)


if __name__ == "__main__":
    print(
        json.dumps(
            {name: median(_ms_per_gib(lane, seed) for seed in range(REPEATS)) for name, lane in LANE_BYTES.items()}
        )
    )
