"""A program that computes on a GPU, for machines without one: it becomes a client as CUDA's driver would make it one.

It writes a line to the file that it is given for each piece of work. What was terminated, or is a client of a server
in a fault, works no more, and waits to be killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fake_mps import DIRECTORY, Client
from fake_mps_main import ask, daemon_root


def main(file: Path) -> None:
    root = daemon_root(os.environ.get(DIRECTORY, "/tmp/nvidia-mps"))
    client: Client | str = "outside"
    while root is not None:
        client = ask(root, lambda fake: fake.connect(os.getpid(), os.geteuid(), os.environ, "program"))
        if client not in ("waits", "not ready"):
            break
        time.sleep(0.02)
    with file.open("a") as beats:
        while True:
            if root is None or isinstance(client, str) or ask(root, lambda fake: fake.works(os.getpid())):
                beats.write(f"{os.getpid()}\n")
                beats.flush()
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
