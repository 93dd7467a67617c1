"""How the tiles of a bucket are reached in local memory.

A run of tiles is *direct* where they lie in local memory just as in the bucket: a delta is applied there. All others
go over a copy: `copies` say which elements of the run lie where.

Invariants
- The runs of a bucket cover each of its tiles once, in order.
- The copies of a run reach every element of its tiles, and more than once only what the rank holds more than once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rose_transfer.codec.streams import TILE_ELEMENTS, tile_count
from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.layout import Piece
from rose_transfer.layout.strided import View
from rose_transfer.live.held import HeldBucket, HeldRegion


@dataclass(frozen=True, slots=True)
class PartCopy:
    """Elements of a run (counted from its first tile) and where the same ones lie in local `tensor`.

    `is_shared` where some of them may lie elsewhere as well.
    """

    within_run: View
    tensor: str
    local: View
    is_shared: bool


@dataclass(frozen=True, slots=True)
class DirectRun:
    """Tiles `first` up to `end`, the first of which begins at element `offset` of local `tensor`."""

    first: int
    end: int
    tensor: str
    offset: int


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """Tiles `first` up to `end`, `elements` in all."""

    first: int
    end: int
    elements: int
    copies: tuple[PartCopy, ...]


Run = DirectRun | CopiedRun


def tile_runs(held: HeldBucket, is_plain: Callable[[str], bool]) -> tuple[Run, ...]:
    """The runs of a bucket. `is_plain` tells whether a local tensor's memory has the bucket's own form of elements."""
    runs: list[Run] = []
    at = 0
    for direct in (*_direct_runs(held, is_plain), None):
        upto = tile_count(held.bucket.elements) if direct is None else direct.first
        if at < upto:
            runs.append(_copied_run(held, at, upto))
        if direct is not None:
            runs.append(direct)
            at = direct.end
    return tuple(runs)


def flat_boxes(sizes: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Elements `start` up to `end` of a row-major array of `sizes`, as boxes; at most two per axis, and one."""
    if start >= end:
        return
    if not sizes:
        yield Box((), ())
        return
    row = math.prod(sizes[1:])
    first, last = start // row, end // row
    if first == last:
        yield from _in_row(first, flat_boxes(sizes[1:], start - first * row, end - first * row))
        return
    if start > first * row:
        yield from _in_row(first, flat_boxes(sizes[1:], start - first * row, row))
        first += 1
    if first < last:
        yield Box((first, *(0,) * len(sizes[1:])), (last - first, *sizes[1:]))
    yield from _in_row(last, flat_boxes(sizes[1:], 0, end - last * row))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.starts), (1, *box.sizes))


def _direct_runs(held: HeldBucket, is_plain: Callable[[str], bool]) -> Iterator[DirectRun]:
    elements = held.bucket.elements
    for region in held.regions:
        if not region.held_once:
            continue
        for piece in sorted(region.pieces):
            if not (is_plain(piece.tensor) and _is_flat(region.region.box, piece)):
                continue
            start = region.start + _flat_index(region.region.box, piece.box)
            stop = start + piece.box.elements
            first = -(-start // TILE_ELEMENTS)
            end = tile_count(elements) if stop == elements else stop // TILE_ELEMENTS
            if first < end:
                yield DirectRun(first, end, piece.tensor, piece.offset + first * TILE_ELEMENTS - start)


def _is_flat(region: Box, piece: Piece) -> bool:
    """Whether the elements of a piece follow each other without gaps, in the region and in local memory alike."""
    steps = row_major(piece.box.sizes)
    there = row_major(region.sizes)
    return all(
        size <= 1 or (step == own == inside)
        for size, step, own, inside in zip(piece.box.sizes, steps, piece.strides, there, strict=True)
    )


def _flat_index(region: Box, box: Box) -> int:
    """The first element of `box`, counted in the region."""
    steps = row_major(region.sizes)
    return sum((at - start) * step for at, start, step in zip(box.starts, region.starts, steps, strict=True))


def _copied_run(held: HeldBucket, first: int, end: int) -> CopiedRun:
    start = first * TILE_ELEMENTS
    stop = min(end * TILE_ELEMENTS, held.bucket.elements)
    copies = tuple(copy for region in held.regions for copy in _copies(region, start, stop))
    return CopiedRun(first, end, stop - start, copies)


def _copies(held: HeldRegion, start: int, stop: int) -> Iterator[PartCopy]:
    """The elements `start` up to `stop` of the bucket that lie in a region."""
    box = held.region.box
    begin, end = max(start - held.start, 0), min(stop - held.start, box.elements)
    for part in flat_boxes(box.sizes, begin, end):
        moved = Box(tuple(at + by for at, by in zip(part.starts, box.starts, strict=True)), part.sizes)
        for piece in held.pieces:
            common = moved.intersect(piece.box)
            if common is not None:
                offset = held.start + _flat_index(box, common) - start
                within = View(offset, common.sizes, row_major(box.sizes))
                yield PartCopy(within, piece.tensor, piece.part(common).view, not held.held_once)
