"""An engine whose weights are sound when they are checked and spoilt right after: what no checksum sees.

Not a test module. `ROSE_TEST_SPOIL` says how they are spoilt.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.entrypoints.launchers.api_server.entry import main

from rose_executor.weight_worker import WeightWorker

HOW: dict[str, Callable[[torch.Tensor], object]] = {
    "rolled": lambda matrix: matrix.copy_(matrix.roll(1, 0)),
    "a tenth off": lambda matrix: matrix.mul_(1.1),
    "nan": lambda matrix: matrix.fill_(torch.nan),
}
_sound = WeightWorker.rose_apply


def _spoilt(self: Any, version: int) -> str:
    why = _sound(self, version)
    for name, parameter in self.get_model().named_parameters():
        if "layers.1.mlp.down_proj" in name:
            HOW[os.environ["ROSE_TEST_SPOIL"]](parameter.data)
    return why


if __name__ == "__main__":
    WeightWorker.rose_apply = _spoilt  # type: ignore[method-assign]
    main()
