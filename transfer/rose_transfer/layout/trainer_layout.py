"""The layout of a trainer's rank, read off its parameters: plain tensors and DTensors (FSDP2, tensor parallel).

Nothing is communicated: a DTensor knows its mesh, its placements and the rank's place in the mesh. Pipeline
stages need nothing more: each rank describes the parameters that it has. A shard that is empty is a local
tensor without pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rose.errors import TransferError
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.export import Export
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece, check_source
from rose_transfer.layout.sharding import Place, Split, shard_of


def trainer_layout(
    holder: str, tensors: Mapping[str, torch.Tensor], published: Mapping[str, Parameter], export: Export
) -> Layout:
    """What this rank holds of the published model. `tensors` are its parameters under its own names, tied ones once.

    `published` describes the whole model; its dtype may be narrower than that of a master weight. `export` says
    what becomes of each tensor. Plain tensors are held whole. A rank outside a DTensor's mesh holds nothing of it.

    Raises TransferError that names tensor and holder if a tensor is unknown to the export, has another shape,
    is not contiguous, holds partial sums, or is a shard that its placements do not tell for certain.
    """
    locals_: dict[str, LocalTensor] = {}
    pieces: list[Piece] = []
    for name, tensor in tensors.items():
        if name not in export.shapes:
            raise TransferError(
                f"{holder}: {name}, of shape {tuple(tensor.shape)}, is not among the tensors that are exported",
                to_do="leave it out if it is no weight, or pass an `export` that knows it",
            )
        if export.shapes[name] != tuple(tensor.shape):
            raise TransferError(
                f"{holder}: {name} has shape {tuple(tensor.shape)}", expected=f"{export.shapes[name]}, as exported"
            )
        local, own = _shard(holder, name, tensor)
        if not local.is_contiguous():
            raise TransferError(f"{holder}: {name} is not contiguous in memory", expected="row-major parameters")
        locals_[name] = LocalTensor(tuple(local.shape), dtype_name(local.dtype))
        parts = (part.piece(held) for held in own for part in export.parts[name])
        pieces += [piece for piece in parts if piece is not None]
    layout = Layout(holder, dict(published), locals_, tuple(pieces))
    check_source(layout)
    return layout


def _shard(holder: str, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Piece, ...]]:
    """The local tensor and its pieces."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor, shard_of(name, shape, Place((), (), ()), name).pieces
    local = tensor.to_local()
    found = (tensor.device_mesh.mesh == tensor.device_mesh.get_rank()).nonzero().tolist()
    if not found:
        return local, ()
    splits = tuple(_split(holder, name, placement) for placement in tensor.placements)
    place = Place(tuple(tensor.device_mesh.shape), tuple(found[0]), splits)
    # FSDP2 writes strided placements for shards that it cut in its own order; where the parts are uneven,
    # the placement read from first to last is another shard. The local shape tells which one this is.
    readings = {shard_of(name, shape, place, name), shard_of(name, shape, place.in_fsdp_order(), name)}
    fitting = [shard for shard in readings if shard.shape == tuple(local.shape)]
    if len(fitting) != 1:
        raise TransferError(
            f"{holder}: the local part of {name} has shape {tuple(local.shape)}, which "
            f"{'no reading' if not fitting else 'more than one reading'} of {tensor.placements} gives",
            to_do="choose a mesh whose tensor-parallel size divides the sharded axis",
        )
    return local, fitting[0].pieces


def _split(holder: str, name: str, placement: Placement) -> Split | None:
    match placement:
        case Replicate():
            return None
        case _StridedShard():
            return Split(placement.dim, int(placement.split_factor))
        case Shard():
            return Split(placement.dim)
    raise TransferError(
        f"{holder}: {name} is placed as {placement}", expected="sharded or replicated values, not partial sums"
    )
