"""Strided copies between row-major arrays, cut into pieces that are boxes on both sides.

A loader's copy is two views of equal sizes: one into a whole parameter, one into a local tensor. Transposes,
narrowing, selecting and regrouping of axes all look alike here. A piece is a box in the coordinates of the
parameter and a box in those of the local tensor, whose axes may be permuted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.layout.box import Box, row_major

# More pieces than this for one copy means element-wise interleaving, which no plan could carry cheaply.
PIECES_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class View:
    """`sizes` elements along each axis of the view, `strides` apart, from `offset`; in elements of the flat array."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> View:
        return cls(0, shape, row_major(shape))


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """`source` of the first array goes to `destination` of the second; `strides` walk the second along the source."""

    source: Box
    destination: Box
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Sizes with the strides of both sides; `offsets` and each entry of `strides` are (source, destination)."""

    offsets: tuple[int, int]
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]

    def without(self, dim: int, index: int) -> _Copy:
        offsets = (
            self.offsets[0] + index * self.strides[dim][0],
            self.offsets[1] + index * self.strides[dim][1],
        )
        return _Copy(offsets, self.sizes[:dim] + self.sizes[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def split(self, dim: int, inner: int) -> _Copy:
        source, destination = self.strides[dim]
        return _Copy(
            self.offsets,
            (*self.sizes[:dim], self.sizes[dim] // inner, inner, *self.sizes[dim + 1 :]),
            (
                *self.strides[:dim],
                (source * inner, destination * inner),
                (source, destination),
                *self.strides[dim + 1 :],
            ),
        )


def box_copies(
    source_shape: tuple[int, ...], source: View, destination_shape: tuple[int, ...], destination: View
) -> list[BoxCopy]:
    """Cut a copy between views of two row-major arrays into boxes.

    Raises TransferError if the views differ in size, repeat elements, reach outside, or would need more than
    `PIECES_MAX` pieces.
    """
    if source.sizes != destination.sizes:
        raise TransferError(f"a copy from sizes {source.sizes} to {destination.sizes}", expected="equal sizes")
    _check_reach(source_shape, source)
    _check_reach(destination_shape, destination)
    if 0 in source.sizes:
        return []
    strides = tuple(zip(source.strides, destination.strides, strict=True))
    kept = [dim for dim, size in enumerate(source.sizes) if size > 1]
    copy = _Copy(
        (source.offset, destination.offset),
        tuple(source.sizes[dim] for dim in kept),
        tuple(strides[dim] for dim in kept),
    )
    pieces: list[BoxCopy] = []
    for piece in _cut(_coalesced(copy), source_shape, destination_shape):
        if len(pieces) == PIECES_MAX:
            raise TransferError(
                f"a copy of sizes {source.sizes} falls into more than {PIECES_MAX} boxes",
                expected="a loader that moves slices, not single elements",
            )
        pieces.append(piece)
    return pieces


def view_boxes(shape: tuple[int, ...], view: View) -> list[Box]:
    """The boxes of a row-major array that a view covers; raises as `box_copies` does."""
    if 0 not in view.sizes:
        _check_reach(shape, view)
        kept = [dim for dim, size in enumerate(view.sizes) if size > 1]
        sizes, strides = tuple(view.sizes[dim] for dim in kept), tuple(view.strides[dim] for dim in kept)
        copy = _Copy((view.offset, view.offset), sizes, tuple(zip(strides, strides, strict=True)))
        fit = _Fit.of(shape, copy, 0)
        if fit.aligned:
            return [fit.box(copy)]
    return [copy.source for copy in box_copies(shape, view, shape, view)]


def _check_reach(shape: tuple[int, ...], view: View) -> None:
    last = view.offset
    elements = 1
    for axis_size in shape:
        elements *= axis_size
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if stride < 0 or (stride == 0 and size > 1):
            raise TransferError(f"a view with strides {view.strides}", expected="one place for each element")
        last += (size - 1) * stride
    if 0 not in view.sizes and not 0 <= view.offset <= last < elements:
        raise TransferError(f"a view over elements {view.offset} to {last} of {elements}", expected="a view inside")


def _coalesced(copy: _Copy) -> _Copy:
    """Join neighbouring dims that both sides walk as one."""
    sizes: list[int] = []
    strides: list[tuple[int, int]] = []
    for size, (source, destination) in zip(copy.sizes, copy.strides, strict=True):
        if sizes and strides[-1] == (source * size, destination * size):
            sizes[-1] *= size
            strides[-1] = (source, destination)
        else:
            sizes.append(size)
            strides.append((source, destination))
    return _Copy(copy.offsets, tuple(sizes), tuple(strides))


def _cut(copy: _Copy, source_shape: tuple[int, ...], destination_shape: tuple[int, ...]) -> Iterator[BoxCopy]:
    """Split or walk one dim after the other until each lies along one axis of either side."""
    source = _Fit.of(source_shape, copy, 0)
    destination = _Fit.of(destination_shape, copy, 1)
    for fit in (source, destination):
        if fit.split is not None:
            yield from _cut(copy.split(*fit.split), source_shape, destination_shape)
            return
    walked = source.stray if source.stray is not None else destination.stray
    if walked is not None:
        for index in range(copy.sizes[walked]):
            yield from _cut(copy.without(walked, index), source_shape, destination_shape)
        return
    strides = [0] * len(source_shape)
    for axis, (_, stride) in zip(source.axes, copy.strides, strict=True):
        strides[axis] = stride
    yield BoxCopy(source.box(copy), destination.box(copy), copy.offsets[1], tuple(strides))


@dataclass(slots=True)
class _Fit:
    """How the dims of a copy lie along the axes of one side: `axes[dim]`, unless a dim must be split or walked."""

    shape: tuple[int, ...]
    starts: list[int]
    axes: list[int]
    split: tuple[int, int] | None = None
    stray: int | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], copy: _Copy, side: int) -> _Fit:
        fit = cls(shape, [], [])
        rest = copy.offsets[side]
        axis_strides = row_major(shape)
        for stride in axis_strides:
            fit.starts.append(rest // stride)
            rest %= stride
        for dim, (size, strides) in enumerate(zip(copy.sizes, copy.strides, strict=True)):
            fit._place(dim, size, strides[side], axis_strides)
            if not fit.aligned:
                break
        return fit

    @property
    def aligned(self) -> bool:
        return self.split is None and self.stray is None

    def _place(self, dim: int, size: int, stride: int, axis_strides: tuple[int, ...]) -> None:
        axes = [axis for axis, own in enumerate(axis_strides) if own == stride and self.shape[axis] > 1]
        if not axes or axes[0] in self.axes:
            self.stray = dim
            return
        axis = axes[0]
        if self.starts[axis] + size <= self.shape[axis]:
            self.axes.append(axis)
        elif self.starts[axis] == 0 and size % self.shape[axis] == 0:
            self.split = (dim, self.shape[axis])
        else:
            self.stray = dim

    def box(self, copy: _Copy) -> Box:
        sizes = [1] * len(self.shape)
        for axis, size in zip(self.axes, copy.sizes, strict=True):
            sizes[axis] = size
        return Box(tuple(self.starts), tuple(sizes))
