"""A child for tests of process trees: forks one child of its own, writes both ids, and sleeps."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        (folder / "grandchild").write_text(str(os.getpid()))
    else:
        (folder / "child").write_text(str(os.getpid()))
        sys.stdout.write(f"working in {os.getcwd()} with {os.environ.get('ROSE_TEST', 'nothing')}\n")
        sys.stdout.flush()
    time.sleep(600)
