"""`rose dashboard` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class DashboardProcess:
    """Started, and its page's address known. `end` sends a signal and gives the exit status."""

    def __init__(self, out: Path, *more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rose.cli.main", "dashboard", "--out", str(out), *more],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
