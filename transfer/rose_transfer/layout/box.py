"""A box: a contiguous range along every axis of an array.

Invariants
- Starts and sizes are never negative.
- A box with a zero size holds nothing; one of no axes holds one element (a scalar).
- `subtract` returns disjoint boxes which together hold exactly what is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

AXES_MAX = 8
"""Arrays have at most so many axes, those of weights up to five: what is done for each corner of a box stays cheap."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Elements `starts[a] <= i[a] < starts[a] + sizes[a]` on every axis a."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    def within(self, shape: tuple[int, ...]) -> bool:
        """Whether this is a box of an array of `shape`."""
        if not len(self.starts) == len(self.sizes) == len(shape):
            return False
        for start, size, limit in zip(self.starts, self.sizes, shape, strict=True):
            if start < 0 or size < 0 or start + size > limit:
                return False
        return True

    def meets(self, other: Box) -> bool:
        """Whether two boxes, neither of them empty, have an element in common."""
        for start, size, begin, length in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True):
            if start + size <= begin or begin + length <= start:
                return False
        return True

    def intersect(self, other: Box) -> Box | None:
        """What both hold; None if nothing."""
        starts: list[int] = []
        sizes: list[int] = []
        for start, size, begin, length in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True):
            first = max(start, begin)
            common = min(start + size, begin + length) - first
            if common <= 0:
                return None
            starts.append(first)
            sizes.append(common)
        return Box(tuple(starts), tuple(sizes))

    def subtract(self, other: Box) -> list[Box]:
        """What this holds and `other` does not, as at most two boxes per axis."""
        common = self.intersect(other)
        if common is None:
            return [self]
        left: list[Box] = []
        starts, ends = list(self.starts), list(self.ends)
        for axis, (begin, end) in enumerate(zip(common.starts, common.ends, strict=True)):
            for start, stop in ((starts[axis], begin), (end, ends[axis])):
                if start < stop:
                    left.append(_between((*starts[:axis], start, *starts[axis + 1 :]), ends, axis, stop))
            starts[axis], ends[axis] = begin, end
        return left

    def __str__(self) -> str:
        ranges = (f"{start}:{end}" for start, end in zip(self.starts, self.ends, strict=True))
        return f"[{', '.join(ranges)}]"


def _between(starts: tuple[int, ...], ends: list[int], axis: int, stop: int) -> Box:
    stops = (*ends[:axis], stop, *ends[axis + 1 :])
    return Box(starts, tuple(end - start for start, end in zip(starts, stops, strict=True)))


def subtract_all(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """What `boxes` hold and no hole does."""
    left = list(boxes)
    for hole in holes:
        left = [part for box in left for part in box.subtract(hole)]
    return left


@functools.lru_cache(4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours along each axis of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
