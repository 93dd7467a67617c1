"""The parameters and buffers of a module, found anew whenever they are asked for.

Invariants
- What is told is what the module computes with now, and not what it did at an earlier time.
- Where that can be no longer what a layout was traced of, or where the module computes with other memory than its
  parameters name, the question is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rose.errors import TransferError
from rose_transfer.live.live_weights import memory_of


class ModuleTensors(Mapping[str, torch.Tensor]):
    """Of `model`, by their names, each once.

    `captured` says that graphs of the computation are captured, which go on with the memory of that time.

    Iteration raises TransferError if the model has got other parameters than it had at first (a tied one has become one
    of its own), or if it is captured and a parameter lies elsewhere.
    """

    def __init__(self, model: torch.nn.Module, *, captured: bool = False) -> None:
        self._model = model
        self._names = {name for name, _ in model.named_parameters()}
        self._captured = {name: memory_of(tensor) for name, tensor in model.named_parameters()} if captured else {}

    def __getitem__(self, name: str) -> torch.Tensor:
        path, _, own = name.rpartition(".")
        try:
            tensor = getattr(self._model.get_submodule(path), own)
        except AttributeError:
            raise KeyError(name) from None
        if not isinstance(tensor, torch.Tensor):
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        found = dict(self._model.named_parameters())
        if found.keys() != self._names:
            changed = sorted(found.keys() ^ self._names)
            raise TransferError(
                f"the model has other parameters than when it was loaded: {', '.join(changed)} came or went",
                expected="the parameters that its layout was traced of",
                to_do="start the engine anew",
            )
        for name, memory in self._captured.items():
            if memory_of(found[name]) != memory:
                raise TransferError(
                    f"{name} has been given other memory, while captured graphs compute with what it had before",
                    expected="weights that stay where they were when the engine started",
                    to_do="start the engine anew, without graphs (enforce_eager) where weights are to move",
                )
        yield from dict.fromkeys((*found, *(name for name, _ in self._model.named_buffers())))

    def __len__(self) -> int:
        return sum(1 for _ in self)
