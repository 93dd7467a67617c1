"""Pieces out of a rank's tensors, and into a bucket.

Weights are rounded to the dtype under which they are published (nearest even) before they are sent; those that have it
already keep every bit. What is sent of one bucket by one rank is its pieces, one behind the other, each row-major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rose_transfer.layout.layout import Piece
from rose_transfer.store.packing import Bucket

Bits = NDArray[np.unsignedinteger[Any]]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, without copying it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def take(tensors: Mapping[str, torch.Tensor], pieces: Sequence[Piece], bucket: Bucket) -> torch.Tensor:
    """The bytes of `pieces`, flat uint8 on the device of the tensors; these are local, row-major, by their names."""
    if not pieces:
        return torch.empty(0, dtype=torch.uint8)
    elements = sum(piece.box.elements for piece in pieces)
    device = tensors[pieces[0].tensor].device
    taken = torch.empty(elements, dtype=getattr(torch, bucket.dtype), device=device)
    at = 0
    for piece in pieces:
        memory = tensors[piece.tensor]
        held = memory.as_strided(piece.box.sizes, piece.strides, memory.storage_offset() + piece.offset)
        end = at + piece.box.elements
        taken[at:end].view(piece.box.sizes).copy_(held)
        at = end
    return taken.view(torch.uint8)


def lay(bits: Bits, bucket: Bucket, pieces: Sequence[Piece], data: NDArray[np.uint8]) -> None:
    """Write what is in `data` to where its `pieces` belong in `bits`, which is `bucket`."""
    starts = {str(place): span.start for place, (_, span) in enumerate(bucket.spans())}
    values = data.view(bits.dtype)
    at = 0
    for piece in pieces:
        begin = starts[piece.tensor] + piece.offset
        strides = tuple(stride * bits.itemsize for stride in piece.strides)
        end = at + piece.box.elements
        as_strided(bits[begin:], piece.box.sizes, strides)[...] = values[at:end].reshape(piece.box.sizes)
        at = end
