"""Watches a loader on the meta device and records which slice of which checkpoint tensor goes where.

Invariants
- Checkpoint tensors and parameters are meta tensors, told apart by their storage: whatever chain of views the
  loader makes, offset, sizes and strides of the last one are the slice.
- A checkpoint tensor may be viewed and copied into a parameter, nothing else. A parameter may be viewed,
  written by such a copy, or filled with zeros (padding). Any other operation on either is refused by name:
  arithmetic, casts and masks could not be carried out by moving slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rose.errors import TransferError
from rose_transfer.layout.strided import View
from rose_transfer.layout.views import VIEWS

_aten = torch.ops.aten
_ZEROS = {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}


@dataclass(frozen=True, slots=True)
class Copied:
    """`source_view` of checkpoint tensor `source` was copied to `target_view` of parameter `target`."""

    source: str
    source_view: View
    target: str
    target_view: View


@dataclass(frozen=True, slots=True)
class Zeroed:
    """`view` of parameter `target` was filled with zeros."""

    target: str
    view: View


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`events` are what the loader did to parameters, in order, while the mode was on."""

    def __init__(self, holder: str, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._holder = holder
        self._sources = {storage_id(tensor): name for name, tensor in sources.items()}
        self._targets = {storage_id(tensor): name for name, tensor in targets.items()}
        self.events: list[Copied | Zeroed] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            return self._copied(func, args[0], args[1])
        if func in _ZEROS and storage_id(args[0]) in self._targets:
            return self._zeroed(func, *args)
        if func is _aten.clone.default and storage_id(args[0]) in self._sources:
            # A copy of a slice in another order of memory is still that slice; writes to it would be refused.
            return _aten.alias.default(args[0])
        if func not in VIEWS:
            self._refuse_use(func, args, kwargs)
        return func(*args, **kwargs)

    def _copied(self, func: Callable[..., Any], target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        to, of = self._targets.get(storage_id(target)), self._sources.get(storage_id(source))
        if to is None and of is None:
            result: torch.Tensor = func(target, source)
            return result
        if to is None or of is None:
            raise self._refused(
                f"{of or 'a value that is no slice of the checkpoint'} is copied to {to or 'a tensor of no parameter'}"
            )
        if target.shape.numel() != source.shape.numel():
            raise self._refused(f"{of} is repeated to fill {tuple(target.shape)} of {to}")
        # Equal in number, so this can only add axes of one element.
        self.events.append(Copied(of, _view(source.expand(target.shape)), to, _view(target)))
        return target

    def _zeroed(self, func: Any, target: torch.Tensor, value: Any = 0) -> torch.Tensor:
        name = self._targets[storage_id(target)]
        if isinstance(value, torch.Tensor) or value != 0:
            raise self._refused(f"{name} is filled with {value} by {func}")
        self.events.append(Zeroed(name, _view(target)))
        return target

    def _refuse_use(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in tree_iter((args, dict(kwargs))):
            if isinstance(value, torch.Tensor):
                name = self._sources.get(storage_id(value), self._targets.get(storage_id(value)))
                if name is not None:
                    raise self._refused(f"{func} is applied to {name}")

    def _refused(self, what: str) -> TransferError:
        return TransferError(
            f"{self._holder}: while loading, {what}",
            expected="a loader that only moves slices of the checkpoint into parameters",
            to_do="update this model by whole versions",
        )


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for all views of one tensor, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
