"""A guest's cache on CPU begins without a page: torch would write its zeros, and take the memory before any quota.

The kernel's anonymous memory is zero too, and comes page by page as it is touched. So while vLLM makes its caches,
large `torch.zeros` of bytes are such memory; all else is torch's own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LARGE_BYTES = 2**20


def install() -> None:
    """For every model runner on CPU that this process makes."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original: Callable[..., None] = CPUModelRunner.initialize_kv_cache

    @wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> None:
        with Untouched():
            original(*args, **kwargs)

    CPUModelRunner.initialize_kv_cache = initialize


class Untouched(TorchFunctionMode):
    """Inside it, large zeros of bytes have no pages yet."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and args:
            shape = args[0] if isinstance(args[0], (tuple, list, torch.Size)) else args
            size = math.prod(shape)
            if size >= _LARGE_BYTES and torch.device(kwargs.get("device") or "cpu").type == "cpu":
                held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(held, dtype=torch.int8).view(*shape)
        return func(*args, **kwargs)
