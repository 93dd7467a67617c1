"""How a trainer's tensors become those of the published checkpoint, discovered from its own export function.

Trainers hold what checkpoints do not: all experts of a layer in one stack, gate and up joined, names of their
own. Whatever turns a state dict into published tensors is run once on tensors without memory; each published
tensor must come out as slices of trainer tensors.

Invariants
- A trainer tensor may be viewed and copied, in those ways that are known to keep its elements as they are. Any other
  operation on it, in place or not, is refused by name, also where the export would not publish the result: what it
  computes would be missing in what is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rose.errors import TransferError
from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.layout import LocalTensor, Parameter, Piece
from rose_transfer.layout.strided import View, box_copies
from rose_transfer.layout.views import VIEWS

StateDict = Mapping[str, torch.Tensor]
_aten = torch.ops.aten
_MORE_VIEWS = frozenset(
    {
        _aten._unsafe_view.default,
        _aten.diagonal.default,
        _aten.expand.default,
        _aten.unfold.default,
        _aten.view.dtype,
    }
)
_SLICES_ONLY = "an export that renames, splits, selects and transposes"


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

    For transformers: `partial(revert_weight_conversion, model)`. Raises TransferError that names the operation if it
    does more to a trainer tensor than to view or copy it, or the published tensor if one is not made of slices of a
    trainer tensor in the same dtype.
    """
    with torch.inference_mode(mode=False):  # where tensors do not count what is written to them
        originals = {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            for name, tensor in tensors.items()
        }
    storages = {name: tensor.untyped_storage() for name, tensor in originals.items()}
    owners = {int(storage._cdata): name for name, storage in storages.items()}
    published = _watched(export, originals, owners)
    found: dict[str, list[Exported]] = {name: [] for name in tensors}
    for name, tensor in published.items():
        owner = owners.get(_storage(tensor))
        of_other_form = tensor.is_conj() or tensor.is_neg()
        if owner is None or dtype_name(tensor.dtype) != tensors[owner].dtype or of_other_form:
            raise TransferError(f"the export of {name} is more than a slice of a trainer tensor", expected=_SLICES_ONLY)
        found[owner] += _exported(name, tensor, tensors[owner].shape)
    return Export(
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: tuple(parts) for name, parts in found.items()},
    )


def _watched(
    export: Callable[[dict[str, torch.Tensor]], StateDict],
    originals: Mapping[str, torch.Tensor],
    owners: Mapping[int, str],
) -> StateDict:
    watch = _ViewsAlone(owners)
    try:
        with watch:
            published = export(dict(originals))
    except Exception:
        if watch.refused is not None:
            raise watch.refused from None
        raise
    if watch.refused is not None:  # an export may catch whatever is raised in it
        raise watch.refused
    for name, tensor in originals.items():
        if tensor._version:  # threads of its own are not watched
            raise TransferError(f"the export writes to {name}", expected=_SLICES_ONLY)
    return published


class _ViewsAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what is done to `owners`' storages but to view and copy them; `refused` is the first of it.

    Keeps memory layout out of it: a copy is the same slice, and shares its storage.
    """

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self.refused: TransferError | None = None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self._owner_of_any(args, kwargs)
        if name is None:
            return func(*args, **kwargs)
        if func is _aten.clone.default:
            return _aten.alias.default(args[0])
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return _aten.alias.default(args[0])
        if func not in VIEWS and func not in _MORE_VIEWS:
            raise self._refuse(f"the export applies {func} to {name}, which is more than to take a slice")
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            # Such as axes that are joined across a transposition: each element would be a slice of its own.
            raise self._refuse(f"{func} of {name} in the export: {error}") from error

    def _owner_of_any(self, *values: Any) -> str | None:
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor):
                name = self._owners.get(_storage(value))
                if name is not None:
                    return name
        return None

    def _refuse(self, what: str) -> TransferError:
        refused = TransferError(what, expected=_SLICES_ONLY)
        self.refused = self.refused or refused
        return refused


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
