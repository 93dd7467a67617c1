"""A guest whose engine core is a process of its own, as vLLM's is: starts a client, says its own pid, and waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    client, beats, parent = sys.argv[1:]
    Path(parent).write_text(str(os.getpid()))
    subprocess.run([sys.executable, client, beats], check=False)
