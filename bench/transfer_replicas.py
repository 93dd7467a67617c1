"""A small model and the ranks that hold it: replicas of an engine that is four ranks wide.

Matrices are cut by rows, as column-parallel layers are; a norm is held by every rank.
"""

from __future__ import annotations

from collections.abc import Collection

from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.store.packing import BucketId, Packing

TP = 4
LAYERS = 8
ROWS, COLUMNS = 2048, 2048
PARAMETERS = {f"layer{index}.weight": Parameter((ROWS, COLUMNS), "bfloat16") for index in range(LAYERS)} | {
    f"layer{index}.norm": Parameter((COLUMNS,), "bfloat16") for index in range(LAYERS)
}


def rank_layout(replica: int, rank: int) -> Layout:
    """What one rank holds."""
    pieces = []
    tensors = {}
    for name, parameter in PARAMETERS.items():
        box = Box.whole(parameter.shape)
        if len(parameter.shape) == 2:
            rows, columns = parameter.shape
            box = Box((rank * rows // TP, 0), (rows // TP, columns))
        tensors[name] = LocalTensor(box.sizes, parameter.dtype)
        strides = (box.sizes[-1], 1)[-len(box.sizes) :]
        pieces.append(Piece(name, box, name, 0, strides))
    return Layout(f"engine-{replica} tp {rank}", PARAMETERS, tensors, tuple(pieces))


def buckets_of(layout: Layout, packing: Packing) -> Collection[BucketId]:
    """The buckets that hold anything of this rank."""
    held = layout.by_parameter()
    return {
        bucket.bucket_id
        for bucket in packing.buckets
        if any(piece.box.intersect(region.box) for region in bucket.regions for piece in held.get(region.parameter, ()))
    }
