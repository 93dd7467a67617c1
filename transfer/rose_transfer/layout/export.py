"""How a trainer's tensors become those of the published checkpoint, discovered from its own export function.

Trainers hold what checkpoints do not: all experts of a layer in one stack, gate and up joined, names of their
own. Whatever turns a state dict into published tensors is run once on tensors without memory; each published
tensor must come out as slices of trainer tensors. An export that computes (joins, adds, casts) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rose.errors import TransferError
from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.layout import LocalTensor, Parameter, Piece
from rose_transfer.layout.strided import View, box_copies

StateDict = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Exported:
    """`box` of published `parameter` is `within` of a trainer tensor; `axes[a]` of that walks axis a of `box`.

    None for an axis of one element.
    """

    parameter: str
    box: Box
    within: Box
    axes: tuple[int | None, ...]

    def piece(self, held: Piece) -> Piece | None:
        """The published part of what is held of the trainer tensor; None if there is none."""
        common = self.within.intersect(held.box)
        if common is None:
            return None
        held = held.part(common)
        starts, sizes, strides = list(self.box.starts), [1] * len(self.axes), [0] * len(self.axes)
        for axis, of in enumerate(self.axes):
            if of is not None:
                starts[axis] += common.starts[of] - self.within.starts[of]
                sizes[axis], strides[axis] = common.sizes[of], held.strides[of]
        return Piece(self.parameter, Box(tuple(starts), tuple(sizes)), held.tensor, held.offset, tuple(strides))


@dataclass(frozen=True, slots=True)
class Export:
    """What each trainer tensor, of these whole shapes, becomes. One that is not published becomes nothing."""

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[Exported, ...]]

    @classmethod
    def under_own_names(cls, published: Mapping[str, Parameter]) -> Export:
        """For a trainer whose tensors are named and shaped as published."""
        parts = {
            name: (Exported(name, Box.whole(value.shape), Box.whole(value.shape), tuple(range(len(value.shape)))),)
            for name, value in published.items()
        }
        return cls({name: value.shape for name, value in published.items()}, parts)


def trace_export(tensors: Mapping[str, LocalTensor], export: Callable[[dict[str, torch.Tensor]], StateDict]) -> Export:
    """Run `export` on tensors of these whole (unsharded) shapes and see what becomes of them.

    For transformers: `partial(revert_weight_conversion, model)`. Raises TransferError that names the published
    tensor if one is not made of slices of a trainer tensor in the same dtype.
    """
    originals = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for name, tensor in tensors.items()
    }
    owners = {_storage(tensor): name for name, tensor in originals.items()}
    with _CopiesAreViews():
        published = export(dict(originals))
    found: dict[str, list[Exported]] = {name: [] for name in tensors}
    for name, tensor in published.items():
        owner = owners.get(_storage(tensor))
        if owner is None or dtype_name(tensor.dtype) != tensors[owner].dtype:
            raise TransferError(
                f"the export of {name} is more than a slice of a trainer tensor",
                expected="an export that renames, splits, selects and transposes",
            )
        found[owner] += _exported(name, tensor, tensors[owner].shape)
    return Export(
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: tuple(parts) for name, parts in found.items()},
    )


class _CopiesAreViews(TorchFunctionMode):
    """Keeps memory layout out of it: a tensor made contiguous is still the same slice."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _exported(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> list[Exported]:
    published = tuple(tensor.shape)
    view = View(int(tensor.storage_offset()), published, tuple(tensor.stride()))
    steps = row_major(shape)
    parts: list[Exported] = []
    for copy in box_copies(published, View.whole(published), shape, view):
        axes = tuple(
            next(axis for axis, step in enumerate(steps) if step == stride and shape[axis] > 1) if size > 1 else None
            for size, stride in zip(copy.source.sizes, copy.strides, strict=True)
        )
        parts.append(Exported(name, copy.source, copy.destination, axes))
    return parts


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
