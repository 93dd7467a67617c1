"""Tensors into the flat buckets of a packing, and back, to the bit.

Tensors are rounded to the dtype under which they are published (nearest even); those that have it already keep every
bit, NaN payloads and negative zeros included. A tensor of several names is packed once, under the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_transfer.layout.box import Box
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.layout import Parameter
from rose_transfer.store.packing import LANE_BYTES, Bucket, Packing

Bits = NDArray[np.unsignedinteger[Any]]
_INTEGERS = {2: torch.int16, 4: torch.int32}


def state_parameters(state_dict: Mapping[str, torch.Tensor]) -> dict[str, Parameter]:
    """What a state dict publishes as it is: its tensors in their dtypes, one that has several names under its first.

    Raises TransferError as `check_dtypes` does.
    """
    found: dict[str, Parameter] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or place not in seen:
            found[name] = Parameter(tuple(tensor.shape), dtype_name(tensor.dtype))
            seen.add(place)
    check_dtypes(found)
    return found


def check_dtypes(parameters: Mapping[str, Parameter]) -> None:
    """Raises TransferError that names the first of `parameters` whose dtype is none of those that are published."""
    for name, parameter in parameters.items():
        if parameter.dtype not in LANE_BYTES:
            raise TransferError(
                f"{name} has dtype {parameter.dtype}",
                expected=f"one of {', '.join(LANE_BYTES)}",
                to_do="leave it out if it is no weight: what is published, and in which dtype, "
                "`parameters=` of a WeightPublisher says",
            )


def pack(packing: Packing, state_dict: Mapping[str, torch.Tensor]) -> Iterator[Bits]:
    """The buckets of `packing`, in its order: each in memory of its own.

    Raises TransferError if a tensor is missing or has another shape.
    """
    for name in sorted({region.parameter for bucket in packing.buckets for region in bucket.regions}):
        shape = packing.parameters[name].shape
        if name not in state_dict:
            raise TransferError(f"the new weights have no {name}", expected="every parameter that is packed")
        if tuple(state_dict[name].shape) != shape:
            raise TransferError(f"{name} has shape {tuple(state_dict[name].shape)}", expected=f"{shape}, as packed")
    for bucket in packing.buckets:
        # Without a name: no bucket stays while the next one is made.
        yield _packed(bucket, state_dict)


def unpack(packing: Packing, buckets: Iterable[Bits]) -> dict[str, torch.Tensor]:
    """The parameters that `buckets`, those of `packing` in its order, hold whole; each name once.

    Raises TransferError if some element of a parameter is in no bucket, or a bucket does not fit.
    """
    missing = {name: Box.whole(value.shape).elements for name, value in packing.parameters.items()}
    tensors = {
        name: torch.empty(value.shape, dtype=getattr(torch, value.dtype)) for name, value in packing.parameters.items()
    }
    for bucket, bits in zip(packing.buckets, buckets, strict=True):
        if (bits.size, bits.itemsize) != (bucket.elements, bucket.lane):
            raise TransferError(
                f"bucket {bucket.bucket_id} has {bits.size} elements of {bits.itemsize} bytes",
                expected=f"{bucket.elements} of {bucket.lane}",
            )
        flat = torch.from_numpy(bits.view(f"<i{bucket.lane}")).view(getattr(torch, bucket.dtype))
        for region, span in bucket.spans():
            tensors[region.parameter][_index(region.box)].copy_(flat[span].view(region.box.sizes))
            missing[region.parameter] -= region.box.elements
    if absent := [name for name, elements in missing.items() if elements]:
        raise TransferError(f"the buckets hold only a part of {', '.join(absent[:4])}", expected="every element")
    return tensors


def _packed(bucket: Bucket, state_dict: Mapping[str, torch.Tensor]) -> Bits:
    dtype, bits = getattr(torch, bucket.dtype), _INTEGERS[bucket.lane]
    # Memory from NumPy is in large pages where there are any: to get small ones takes longer than to fill them.
    packed = torch.from_numpy(np.empty(bucket.elements, f"<i{bucket.lane}"))
    for region, span in bucket.spans():
        part = state_dict[region.parameter].detach()[_index(region.box)]
        into = packed[span].view(region.box.sizes)
        if part.device.type == "cpu" and part.dtype == dtype:
            # By this thread alone: torch would have others help, which are busy with the buckets before.
            np.copyto(into.numpy(), part.view(bits).numpy())
        else:
            into.view(dtype).copy_(part)
    return packed.numpy().view(f"<u{bucket.lane}")


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))
