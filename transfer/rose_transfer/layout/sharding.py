"""Which box a rank holds of an array that is split over a mesh of ranks.

Splits apply from the first mesh axis to the last, each to what the one before left. A split of n elements
into k shards gives ceil(n / k) to each until nothing is left: the last ones may be short or empty. A split
with a `split_factor` f first cuts into f parts and takes its shard of every part: a way to write, from first
to last, that FSDP shards (an earlier mesh axis) what tensor parallelism (a later one) has sharded before. The
two readings give the same shard only if the parts are as even as they can be; `in_fsdp_order` is the other.
Source: torch.distributed.tensor, placements `Shard`, `Replicate` and `_StridedShard` (torch 2.13), and what
FSDP2 was seen to hold.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.layout import Piece

Run = tuple[int, int]
"""First element and length of a contiguous range along one axis."""


@dataclass(frozen=True, slots=True)
class Split:
    """Axis `axis` of the array is split over one axis of the mesh."""

    axis: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds: local shape, and the pieces of it in local row-major memory (none if it is empty)."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinate in a mesh, and how each axis of the mesh splits the array (None: it replicates)."""

    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    splits: tuple[Split | None, ...]

    def in_fsdp_order(self) -> Place:
        """The same rank with every split that has a factor applied after those that the factor stands for.

        An axis of the array whose factors say something else keeps its order. Factors: the product of the
        sizes of all later mesh axes that split the same axis.
        """
        order: list[int] = []
        splits = list(self.splits)
        for axis in sorted({split.axis for split in self.splits if split is not None}):
            mine = [m for m, split in enumerate(self.splits) if split is not None and split.axis == axis]
            strided = [m for m in mine if self._factor(m) > 1]
            plain = [m for m in mine if self._factor(m) == 1]
            if mine == strided + plain and all(self._factor(m) == self._later(m, mine) for m in strided):
                order += plain + strided[::-1]
                for m in strided:
                    splits[m] = Split(axis)
            else:
                order += mine
        return Place(
            tuple(self.mesh_shape[m] for m in order),
            tuple(self.coordinate[m] for m in order),
            tuple(splits[m] for m in order),
        )

    def _factor(self, mesh_axis: int) -> int:
        split = self.splits[mesh_axis]
        return 1 if split is None else split.split_factor

    def _later(self, mesh_axis: int, mine: list[int]) -> int:
        return math.prod(self.mesh_shape[m] for m in mine if m > mesh_axis)


def shard_of(parameter: str, shape: tuple[int, ...], place: Place, tensor: str) -> Shard:
    """The shard of `parameter` at `place`, in a local tensor of its own.

    Raises TransferError that names the parameter if shape and place do not fit.
    """
    _check(parameter, shape, place)
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    for ways, at, split in zip(place.mesh_shape, place.coordinate, place.splits, strict=True):
        if split is not None:
            runs[split.axis] = _shard(runs[split.axis], ways, at, split.split_factor)
    local_shape = tuple(sum(length for _, length in axis_runs) for axis_runs in runs)
    strides = row_major(local_shape)
    pieces = []
    for combination in itertools.product(*(_placed(axis_runs) for axis_runs in runs)):
        box = Box(tuple(run[0] for _, run in combination), tuple(run[1] for _, run in combination))
        offset = sum(start * stride for (start, _), stride in zip(combination, strides, strict=True))
        steps = tuple(stride if size > 1 else 0 for stride, size in zip(strides, box.sizes, strict=True))
        pieces.append(Piece(parameter, box, tensor, offset, steps))
    return Shard(local_shape, tuple(pieces))


def _shard(runs: list[Run], ways: int, place: int, split_factor: int) -> list[Run]:
    if split_factor == 1:
        return _joined(_chunk(runs, ways, place))
    parts = (_chunk(runs, split_factor, part) for part in range(split_factor))
    return _joined([run for part in parts for run in _chunk(part, ways, place)])


def _chunk(runs: list[Run], ways: int, place: int) -> list[Run]:
    """The elements of shard `place` of `ways`, counted along the runs."""
    total = sum(length for _, length in runs)
    size = -(-total // ways)
    begin, end = min(place * size, total), min((place + 1) * size, total)
    taken: list[Run] = []
    at = 0
    for start, length in runs:
        low, high = max(begin - at, 0), min(end - at, length)
        if low < high:
            taken.append((start + low, high - low))
        at += length
    return taken


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _placed(runs: list[Run]) -> list[tuple[int, Run]]:
    """Each run with its place along the local axis."""
    places = itertools.accumulate((length for _, length in runs), initial=0)
    return list(zip(places, runs, strict=False))


def _check(parameter: str, shape: tuple[int, ...], place: Place) -> None:
    fits = len(place.mesh_shape) == len(place.coordinate) == len(place.splits)
    if not fits or any(not 0 <= at < ways for at, ways in zip(place.coordinate, place.mesh_shape, strict=False)):
        raise TransferError(
            f"{parameter}: {len(place.splits)} placements at {place.coordinate} of a mesh {place.mesh_shape}",
            expected="one placement for each axis of the mesh, and a place in it",
        )
    for split in place.splits:
        if split is not None and (not 0 <= split.axis < len(shape) or split.split_factor < 1):
            raise TransferError(f"{parameter} of shape {shape} is split by {split}", expected="an axis of it")
