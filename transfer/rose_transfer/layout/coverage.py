"""How often each element of an array is held by a set of boxes, exactly and without touching elements.

The edges of the boxes cut the array into a grid of cells; all elements of a cell are held equally often. A
difference array over the cells, summed along every axis, gives the counts: time and memory follow the number
of boxes, not the size of the array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_transfer.layout.box import AXES_MAX, Box

CELLS_MAX = 1 << 24
CELLS_PER_BOX_MAX = 1024
"""Slices cut an array into a few cells for each of them, in whatever axes; more come from boxes scattered at random."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """`counts[i, j, ...]` boxes hold each element of the cell between `edges[0][i]` and `edges[0][i + 1]`, ..."""

    edges: tuple[NDArray[np.int64], ...]
    counts: NDArray[np.int64]

    @property
    def fewest(self) -> int:
        """Boxes that hold the least held element; 0 for an array without elements."""
        return int(self.counts.min()) if self.counts.size else 0

    @property
    def most(self) -> int:
        return int(self.counts.max(initial=0))

    def cells(self, chosen: NDArray[np.bool_]) -> Iterator[Box]:
        """The cells where `chosen`, an array like `counts`, is true."""
        for index in np.argwhere(chosen):
            yield self.cell(tuple(int(i) for i in index))

    def cell(self, index: tuple[int, ...]) -> Box:
        starts = tuple(int(edges[i]) for edges, i in zip(self.edges, index, strict=True))
        ends = tuple(int(edges[i + 1]) for edges, i in zip(self.edges, index, strict=True))
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def first(self, chosen: NDArray[np.bool_]) -> Box | None:
        """The first cell where `chosen` is true."""
        return next(self.cells(chosen), None)


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> Coverage:
    """Count how often boxes within `shape` hold each element.

    Raises TransferError if they are so scattered that the grid would be large, or the array has too many axes.
    """
    if len(shape) > AXES_MAX:
        raise TransferError(f"an array of {len(shape)} axes", expected=f"at most {AXES_MAX}")
    starts = np.array([box.starts for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    ends = np.array([box.ends for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    edges = tuple(
        np.unique(np.concatenate(([0, size], starts[:, axis], ends[:, axis]))) for axis, size in enumerate(shape)
    )
    cells = tuple(len(axis_edges) - 1 for axis_edges in edges)
    cells_max = min(CELLS_MAX, CELLS_PER_BOX_MAX * (len(boxes) + 1))
    if np.prod([float(count) for count in cells]) > cells_max:
        raise TransferError(
            f"{len(boxes)} boxes cut an array of shape {shape} into {' x '.join(map(str, cells))} cells",
            expected=f"at most {cells_max} cells",
        )
    low = [np.searchsorted(edges[axis], starts[:, axis]) for axis in range(len(shape))]
    high = [np.searchsorted(edges[axis], ends[:, axis]) for axis in range(len(shape))]
    steps = np.zeros(tuple(count + 1 for count in cells), dtype=np.int64)
    for corner in itertools.product((0, 1), repeat=len(shape)):
        at = tuple((high if side else low)[axis] for axis, side in enumerate(corner))
        np.add.at(steps, at, (-1) ** sum(corner) if shape else len(boxes))
    for axis in range(len(shape)):
        steps = steps.cumsum(axis=axis)
    return Coverage(edges, np.asarray(steps[tuple(slice(0, count) for count in cells)]))
