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

from rose_transfer.layout.plan import Segment
from rose_transfer.store.packing import Bucket

Bits = NDArray[np.unsignedinteger[Any]]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, without copying it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def take(tensors: Mapping[str, torch.Tensor], segments: Sequence[Segment], bucket: Bucket) -> torch.Tensor:
    """The bytes of `segments`, flat uint8 on the device of the tensors; these are local, row-major, by their names."""
    if not segments:
        return torch.empty(0, dtype=torch.uint8)
    elements = sum(segment.source.box.elements for segment in segments)
    device = tensors[segments[0].source.tensor].device
    taken = torch.empty(elements, dtype=getattr(torch, bucket.dtype), device=device)
    at = 0
    for segment in segments:
        piece = segment.source
        memory = tensors[piece.tensor]
        held = memory.as_strided(piece.box.sizes, piece.strides, memory.storage_offset() + piece.offset)
        end = at + piece.box.elements
        taken[at:end].view(piece.box.sizes).copy_(held)
        at = end
    return taken.view(torch.uint8)


def lay(bits: Bits, bucket: Bucket, segments: Sequence[Segment], data: NDArray[np.uint8]) -> None:
    """Write the pieces in `data` to where they belong in `bits`, which is `bucket`."""
    starts = {str(place): span.start for place, (_, span) in enumerate(bucket.spans())}
    values = data.view(bits.dtype)
    at = 0
    for segment in segments:
        piece = segment.destination
        begin = starts[piece.tensor] + piece.offset
        strides = tuple(stride * bits.itemsize for stride in piece.strides)
        end = at + piece.box.elements
        as_strided(bits[begin:], piece.box.sizes, strides)[...] = values[at:end].reshape(piece.box.sizes)
        at = end
