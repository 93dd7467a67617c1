"""The name of a dtype in a layout."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name for it: "bfloat16", "float32"."""
    return str(dtype).removeprefix("torch.")
