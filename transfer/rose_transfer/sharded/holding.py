"""What this rank holds of the model, looked at anew for every version, described anew only when it has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from rose_transfer.layout.export import Export
from rose_transfer.layout.layout import Layout, Parameter, check_source
from rose_transfer.layout.layout_json import fingerprint, from_json, to_json
from rose_transfer.layout.trainer_layout import trainer_layout
from rose_transfer.sharded.pieces import local_tensor

_Signature = tuple[tuple[object, ...], ...]


class Holding:
    """The part of `published`, the whole model, that is in the tensors of `holder`; empty until `look`."""

    def __init__(self, holder: str, published: Mapping[str, Parameter], export: Export) -> None:
        self._holder = holder
        self._published = published
        self._export = export
        self._signature: _Signature | None = None
        self._layout = Layout(holder, published, {}, ())
        self.fingerprint = ""
        self.tensors: dict[str, torch.Tensor] = {}

    def look(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold `tensors`, named as in the trainer; a second name of one that is published is left out.

        Raises TransferError as `trainer_layout` and `check_source` do.
        """
        own = self._without_second_names(tensors)
        self.tensors = {name: local_tensor(tensor) for name, tensor in own.items()}
        signature = tuple(_signature(name, own[name], local) for name, local in self.tensors.items())
        if signature != self._signature:
            self._layout = trainer_layout(self._holder, own, self._published, self._export)
            check_source(self._layout)
            self.fingerprint = fingerprint(self._layout)
            self._signature = signature

    def to_bytes(self) -> bytes:
        """The layout, for the other ranks; these know the published model themselves."""
        return to_json(dataclasses.replace(self._layout, parameters={})).encode()

    def layout_of(self, data: bytes) -> Layout:
        """The layout in the `to_bytes` of any rank."""
        return dataclasses.replace(from_json(data.decode()), parameters=self._published)

    def _without_second_names(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        known = {name: tensor for name, tensor in tensors.items() if name in self._export.shapes}
        places = {_place(tensor) for tensor in known.values()}
        others = {name: tensor for name, tensor in tensors.items() if name not in known}
        strangers = {
            name: tensor
            for name, tensor in others.items()
            if local_tensor(tensor).numel() and _place(tensor) not in places
        }
        return known | strangers


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    local = local_tensor(tensor)
    return (local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype)


def _signature(name: str, tensor: torch.Tensor, local: torch.Tensor) -> tuple[object, ...]:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return (name, tuple(tensor.shape), tuple(local.shape), local.stride(), local.dtype, placed)
