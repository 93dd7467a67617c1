"""A program for tests of guards: starts a child in a session of its own, writes all ids, and sleeps or ends as told.

The child ignores what asks it to end, and was forked where no hook of the interpreter sees it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, end = Path(sys.argv[1]), sys.argv[2]
    stray = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stray], start_new_session=True, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    if end == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    (folder / "ids").write_text(f"{os.getppid()} {os.getpid()} {child.pid}")
    if end.isdigit():
        sys.exit(int(end))
    time.sleep(600)
