"""The kernels in NumPy, for machines on which the native library could not be built.

The tests hold the native kernels to these, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rose_transfer.codec.numpy_tile import Tile, Unsound, element_hashes, merge, ordered, pack, total, unpack
from rose_transfer.codec.streams import (
    TILE_ELEMENTS,
    Bits,
    MalformedDelta,
    Mode,
    Streams,
    tile_count,
    tile_lengths,
)


class NumpyKernels:
    name = "numpy"

    def tile_hashes(self, bits: Bits) -> NDArray[np.uint64]:
        hashes = np.empty(tile_count(bits.size), dtype=np.uint64)
        for tile in range(len(hashes)):
            data = bits[tile * TILE_ELEMENTS :][:TILE_ELEMENTS]
            hashes[tile] = total(element_hashes(tile, np.arange(data.size), data))
        return hashes

    def encode(self, old: Bits | None, new: Bits, mode: Mode) -> Streams:
        packed: list[Tile] = []
        for tile, n in enumerate(tile_lengths(new.size)):
            start = tile * TILE_ELEMENTS
            after = new[start : start + int(n)]
            before = None if old is None else old[start : start + int(n)]
            at = np.arange(n, dtype=np.int64) if before is None else np.flatnonzero(before != after)
            hashes = element_hashes(tile, at, after[at])
            if mode == "overwrite" or before is None:
                packed.append(pack(at, after[at], int(n), "overwrite", total(hashes)))
            else:
                check = total(hashes - element_hashes(tile, at, before[at]))
                packed.append(pack(at, ordered(after[at]) - ordered(before[at]), int(n), mode, check))
        return _join(packed, new.itemsize)

    def inspect(self, streams: Streams, elements: int, lane: int, mode: Mode) -> tuple[int, str] | None:
        for tile, part, n in _cut(streams, elements, lane):
            try:
                at, step = unpack(part, n, lane, mode)
                if mode == "overwrite" and total(element_hashes(tile, at, step)) != part.check:
                    raise Unsound("its check does not hold")
            except Unsound as fault:
                return tile, str(fault)
        return None

    def apply(
        self, streams: Streams, target: Bits, mode: Mode, *, backwards: bool, first: int, end: int, held_from: int = 0
    ) -> tuple[int, str] | None:
        absent = held_from * TILE_ELEMENTS
        for tile, part, n in _cut(streams, target.size + absent, target.itemsize):
            if not first <= tile < end or part.count == 0:
                continue
            data = target[tile * TILE_ELEMENTS - absent :][:n]
            try:
                at, after = unpack(part, n, target.itemsize, mode)
                if mode == "steps":
                    before = data[at]
                    after = ordered(ordered(before) - after if backwards else ordered(before) + after)
                    grown = total(element_hashes(tile, at, after) - element_hashes(tile, at, before))
                    if grown != (-part.check % 2**64 if backwards else part.check):
                        raise Unsound("its check does not hold")
            except Unsound as fault:
                return tile, str(fault)
            data[at] = after
        return None

    def compose(self, first: Streams, second: Streams, elements: int, lane: int, mode: Mode) -> Streams:
        packed: list[Tile] = []
        tiles = zip(_cut(first, elements, lane), _cut(second, elements, lane), strict=True)
        for (tile, one, n), (_, other, _) in tiles:
            try:
                at, step = merge(unpack(one, n, lane, mode), unpack(other, n, lane, mode), mode)
            except Unsound as fault:
                raise MalformedDelta(f"tile {tile}: {fault}") from fault
            steps_check = (one.check + other.check) % 2**64
            check = steps_check if mode == "steps" else total(element_hashes(tile, at, step))
            packed.append(pack(at, step, n, mode, check))
        return _join(packed, lane)


def _cut(streams: Streams, elements: int, lane: int) -> Iterator[tuple[int, Tile, int]]:
    """(tile, its row and parts, its length), tile by tile."""
    index = values = escape = 0
    counts, index_codes, value_codes = streams.counts, streams.index_codes, streams.value_codes
    value_sizes = streams.value_bytes(lane)
    for tile, n in enumerate(tile_lengths(elements)):
        ends = (
            index + int(streams.index_bytes[tile]),
            values + int(value_sizes[tile]),
            escape + int(streams.escapes[tile]) * lane,
        )
        part = Tile(
            int(counts[tile]),
            int(index_codes[tile]),
            int(value_codes[tile]),
            int(streams.check[tile]),
            streams.index[index : ends[0]],
            streams.values[values : ends[1]],
            streams.escape[escape : ends[2]],
        )
        yield tile, part, int(n)
        index, values, escape = ends


def _join(tiles: list[Tile], lane: int) -> Streams:
    shapes = [tile.count | tile.index_code << 20 | tile.value_code << 24 for tile in tiles]
    return Streams(
        np.array(shapes, dtype=np.uint32),
        np.array([tile.index.size for tile in tiles], dtype=np.uint32),
        np.array([tile.escape.size // lane for tile in tiles], dtype=np.uint32),
        np.array([tile.check for tile in tiles], dtype=np.uint64),
        np.concatenate([tile.index for tile in tiles]),
        np.concatenate([tile.values for tile in tiles]),
        np.concatenate([tile.escape for tile in tiles]),
    )
