"""Where a worker's keys and values lie in its memory, block by block, and how their pages go back to the kernel.

A *lane* is one piece of every block: it begins at `base` for block 0 and `stride` bytes further for each next one, and
is `length` bytes long. A layer whose blocks are contiguous is one lane.

Invariants
- The layout is read off the tensors that the worker computes with. What cannot be read off without doubt is refused:
  a wrong guess would empty a block that is in use.
- Only whole pages go back, and none that any byte of another block lies on. Their addresses stay valid: who touches one
  again gets zeros, as a fresh block has them.

The functions that take a `worker` run inside it: `collective_rpc` brings them there, whatever executor runs the worker.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rose.errors import EngineError

Run = tuple[int, int]
"""So many blocks in a row, from the first: (first, count)."""


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    base: int
    stride: int
    length: int


def runs_of(blocks: Iterable[int]) -> list[Run]:
    """The same blocks, put together where their numbers follow each other."""
    runs: list[Run] = []
    for block in sorted(blocks):
        if runs and sum(runs[-1]) == block:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return runs


def lanes_of(base: int, shape: Sequence[int], strides: Sequence[int], item: int, blocks: int) -> list[Lane]:
    """The lanes of one tensor at the address `base`; `strides` and `item` are in bytes.

    Raises EngineError if its dimension of blocks is in doubt.
    """
    found = [at for at, size in enumerate(shape) if size == blocks]
    if len(found) != 1:
        raise EngineError(
            f"a tensor of keys and values of shape {tuple(shape)} does not show where its {blocks} blocks are",
            expected="one dimension of that size",
        )
    inner = sorted(
        (stride, size) for at, (stride, size) in enumerate(zip(strides, shape, strict=True)) if at != found[0]
    )
    length = item
    while inner and inner[0][0] == length:
        length *= inner.pop(0)[1]
    offsets = (sum(steps) for steps in itertools.product(*(range(0, stride * size, stride) for stride, size in inner)))
    return [Lane(base + offset, strides[found[0]], length) for offset in offsets]


def joined(lanes: Iterable[Lane]) -> list[Lane]:
    """The same lanes without repetition, those put together that touch each other in every block."""
    result: list[Lane] = []
    for lane in sorted(set(lanes)):
        last = result[-1] if result else None
        if last is not None and last.stride == lane.stride and last.base + last.length == lane.base:
            result[-1] = Lane(last.base, last.stride, last.length + lane.length)
        else:
            result.append(lane)
    return result


def whole_pages(lanes: Iterable[Lane], runs: Iterable[Run], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """Address and length of the whole pages that lie in these blocks alone."""
    pages = []
    runs = list(runs)
    for lane in lanes:
        gapless = lane.length == lane.stride
        for first, count in runs:
            pieces = [(first, count)] if gapless else [(block, 1) for block in range(first, first + count)]
            for block, many in pieces:
                start = lane.base + block * lane.stride
                begin, end = -(-start // page) * page, (start + many * lane.length) // page * page
                if end > begin:
                    pages.append((begin, end - begin))
    return pages


@dataclass(frozen=True, slots=True)
class KvMemory:
    """One worker's keys and values."""

    blocks: int
    lanes: tuple[Lane, ...]

    @property
    def block_bytes(self) -> int:
        return sum(lane.length for lane in self.lanes)

    def give_back(self, runs: Iterable[Run]) -> int:
        """Let the pages of these blocks go; how many bytes that are. Raises EngineError if the kernel refuses."""
        given = 0
        for address, length in whole_pages(self.lanes, runs):
            if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _DONTNEED):
                raise EngineError(
                    f"the kernel keeps pages of keys and values: {os.strerror(ctypes.get_errno())}",
                    expected="private memory that is not locked",
                )
            given += length
        return given


_libc = ctypes.CDLL(None, use_errno=True)
_DONTNEED = 4


def memory_of(tensors: Iterable[Any], blocks: int) -> KvMemory:
    """Of the tensors on the CPU that hold `blocks` blocks each. Raises EngineError as `lanes_of`."""
    lanes: list[Lane] = []
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise EngineError(f"keys and values lie on {tensor.device}", expected="a worker on the CPU")
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        lanes += lanes_of(tensor.data_ptr(), tensor.shape, strides, item, blocks)
    if not lanes:
        raise EngineError("the worker has no keys and values")
    return KvMemory(blocks, tuple(joined(lanes)))


def find_kv_memory(worker: Any, blocks: int) -> tuple[int, str]:
    """Look where this worker's blocks lie, for `give_back_runs`: bytes in each, or why that cannot be known."""
    try:
        memory = memory_of(worker.model_runner.kv_caches, blocks)
    except EngineError as error:
        return 0, error.what
    worker.model_runner.rose_kv_memory = memory
    return memory.block_bytes, ""


def give_back_runs(worker: Any, runs: list[Run]) -> str:
    """Why the pages of these blocks could not go back, "" if they did."""
    try:
        worker.model_runner.rose_kv_memory.give_back(runs)
    except EngineError as error:
        return error.what
    return ""
