"""A program that computes on a GPU, for tests: a line in the file that it is given for each piece of work done."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":
    matrix = torch.ones(256, 256, device="cuda")
    with Path(sys.argv[1]).open("a") as beats:
        while True:
            matrix = (matrix @ matrix).clamp(max=1.0)
            torch.cuda.synchronize()
            beats.write(f"{os.getpid()}\n")
            beats.flush()
            time.sleep(0.05)
