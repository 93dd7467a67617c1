"""`nvidia-cuda-mps-control` for tests, as a program: the daemon's state lies beside its pipes, one command at a time.

    -d [-p 2|3]        "starts" the daemon in CUDA_MPS_PIPE_DIRECTORY

A file `hang` beside the pipes makes a daemon that does not answer.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fake_mps import DIRECTORY, FakeMps

T = TypeVar("T")


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def daemon_root(place: str) -> Path | None:
    """The daemon that a directory of its pipes belongs to."""
    return next((one for one in (Path(place), *Path(place).parents) if (one / "state.json").exists()), None)


def start(root: Path, protocol: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "control").touch()
    (root / "state.json").write_text(json.dumps(FakeMps(protocol, str(root), alive).state()))


def ask(root: Path, what: Callable[[FakeMps], T]) -> T:
    """Do something to the daemon's state."""
    with (root / "control").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fake = FakeMps.of(json.loads((root / "state.json").read_text()), alive)
        answer = what(fake)
        (root / "state.part").write_text(json.dumps(fake.state()))
        (root / "state.part").replace(root / "state.json")
    return answer


def main(arguments: list[str]) -> int:
    place = os.environ.get(DIRECTORY, "/tmp/nvidia-mps")
    if arguments[:1] == ["-d"]:
        start(Path(place), 3 if "3" in arguments else 2)
        return 0
    root = daemon_root(place)
    if root is None:
        sys.stderr.write("Cannot find MPS control daemon process\n")
        return 1
    if (root / "hang").exists():
        time.sleep(600)
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    code, out, err = ask(root, lambda fake: fake.run(arguments, text))
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
