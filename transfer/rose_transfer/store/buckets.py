"""Tensors into the flat buckets of a packing, and back, to the bit.

Tensors are rounded to the dtype under which they are published (nearest even); those that have it already keep every
bit, NaN payloads and negative zeros included. A tensor of several names is packed once, under the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    It may make its tensors only when they are asked for: one that is not kept by it is nobody's second name.

    Raises TransferError as `check_dtypes` does, or if a value is no tensor.
    """
    found: dict[str, Parameter] = {}
    seen: dict[tuple[object, ...], weakref.ref[torch.Tensor]] = {}
    for name, tensor in state_dict.items():
        _check_tensor(name, tensor)
        place = _place(tensor)
        other = seen.get(place) if place is not None else None
        if other is None or other() is None:  # gone: the next tensor may well get the memory of the one before
            found[name] = Parameter(tuple(tensor.shape), dtype_name(tensor.dtype))
        if place is not None:
            seen[place] = weakref.ref(tensor)
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

    Raises TransferError if a tensor is missing, has another shape or is not whole in the memory of this process.
    """
    for name in sorted({region.parameter for bucket in packing.buckets for region in bucket.regions}):
        shape = packing.parameters[name].shape
        if name not in state_dict:
            raise TransferError(f"the new weights have no {name}", expected="every parameter that is packed")
        _check_whole(name, tensor := state_dict[name])
        if tuple(tensor.shape) != shape:
            raise TransferError(f"{name} has shape {tuple(tensor.shape)}", expected=f"{shape}, as packed")
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


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Where its elements are, of one in pieces over ranks this rank's; None if they are nowhere in memory."""
    to_local = _to_local(tensor)
    local = tensor if to_local is None else to_local()
    address = local.data_ptr()
    return (local.device, address, tensor.shape, local.stride(), local.dtype) if address else None


def _to_local(tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The method that only a DTensor has, one in pieces over ranks; that class takes a second to import."""
    return getattr(tensor, "to_local", None)


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TransferError(f"{name} is of type {type(tensor).__name__}", expected="a torch.Tensor", to_do="convert it")
    if tensor.layout != torch.strided:
        raise TransferError(f"{name} has the layout {tensor.layout}", expected="a dense tensor", to_do="use to_dense()")


def _check_whole(name: str, tensor: object) -> None:
    _check_tensor(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if _to_local(tensor) is not None:
        raise TransferError(
            f"{name} is in pieces over the ranks of a {type(tensor).__name__}",
            expected="a tensor that is whole in this process",
            to_do="publish with a ShardedPublisher, or give what its full_tensor() returns",
        )
    if tensor.is_meta:
        raise TransferError(
            f"{name} is on the meta device, without elements", expected="weights", to_do="load the model first"
        )


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
