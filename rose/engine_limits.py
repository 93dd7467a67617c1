"""What an engine may be set to: for job files, executors' files and flags alike. It imports next to nothing."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a value."""
MODEL_LEN_MIN, MODEL_LEN_MAX = 32, 1 << 20
"""Of the longest sequence, prompt and output, in tokens."""
SEQS_MIN, SEQS_MAX = 1, 4096
BLOCK_TOKENS_STEP, BLOCK_TOKENS_MAX = 32, 1024
"""Of a KV block, in tokens: a multiple of the first."""
KV_CACHE_GIB_MIN, KV_CACHE_GIB_MAX = 0.0625, 1024
