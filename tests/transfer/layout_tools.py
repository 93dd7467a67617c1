"""Layouts at random, and plans carried out on NumPy arrays whose every element says which one it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch.distributed as dist
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.testing._internal.distributed.fake_pg import FakeStore

from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.layout.plan import Plan

Array = NDArray[np.int64]
UNWRITTEN = -1


def tagged(parameters: Mapping[str, Parameter]) -> dict[str, Array]:
    """Whole parameters whose elements are numbered through, from 1."""
    values: dict[str, Array] = {}
    first = 1
    for name, parameter in parameters.items():
        count = math.prod(parameter.shape)
        values[name] = np.arange(first, first + count).reshape(parameter.shape)
        first += count
    return values


def window(memory: Array, piece: Piece) -> Array:
    """The elements of flat local memory that a piece describes, in the shape of its box."""
    strides = tuple(stride * memory.itemsize for stride in piece.strides)
    return as_strided(memory[piece.offset :], piece.box.sizes, strides)


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))


def empty_memory(layout: Layout) -> dict[str, Array]:
    return {name: np.full(math.prod(tensor.shape), UNWRITTEN) for name, tensor in layout.tensors.items()}


def memory_of(layout: Layout, values: Mapping[str, Array]) -> dict[str, Array]:
    """Local memory as the layout describes it, by direct slicing of the whole parameters; padding is 0."""
    memory = empty_memory(layout)
    for piece in layout.pieces:
        window(memory[piece.tensor], piece)[...] = values[piece.parameter][inside(piece.box)]
    for pad in layout.pads:
        memory[pad.tensor].reshape(layout.tensors[pad.tensor].shape)[inside(pad.box)] = 0
    return memory


def execute(plan: Plan, sources: Mapping[str, Mapping[str, Array]], memory: Mapping[str, Array]) -> None:
    """Move every segment from the memory of its holder into `memory`."""
    for segment in plan.segments:
        taken = window(sources[segment.holder][segment.source.tensor], segment.source)
        window(memory[segment.destination.tensor], segment.destination)[...] = taken


def zeroed(layout: Layout) -> dict[str, Array]:
    """Unwritten memory in which the padding holds its zeros."""
    memory = empty_memory(layout)
    for pad in layout.pads:
        memory[pad.tensor].reshape(layout.tensors[pad.tensor].shape)[inside(pad.box)] = 0
    return memory


def whole_layout(holder: str, parameters: Mapping[str, Parameter]) -> Layout:
    """A holder of everything, each parameter in a tensor of its own."""
    tensors = {name: LocalTensor(value.shape, value.dtype) for name, value in parameters.items()}
    pieces = [
        Piece(name, Box.whole(value.shape), name, 0, row_major(value.shape))
        for name, value in parameters.items()
        if 0 not in value.shape
    ]
    return Layout(holder, parameters, tensors, tuple(pieces))


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group that only pretends: nothing is ever sent."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
