"""A delta in memory: one row per tile, and the three byte streams that the rows cut up.

A bucket is a flat array of up to 64 MiB of unsigned integers, the bits of bfloat16 (2 bytes, a *lane* of 2) or float32
weights (a lane of 4). It is cut into tiles of 65,536 elements; the last one may be shorter. A tile can be read, applied
and undone alone: its part of each stream begins where those of the tiles before it end.

Row of a tile

    shape         u32   bits 0-19 elements coded, bits 20-23 index code, bits 24-31 value code
    index_bytes   u32   length of its part of the index stream
    escapes       u32   how many elements of the escape stream are its own
    check         u64   steps: by how much the tile's hash grows; overwrite: the hash of the coded elements

Index codes: which elements are coded

    0 gap8     a byte per element, the distance from the element behind the previous one; 255 moves on by 255 without
               an element and is never the last
    1 gap16    the same in 2 bytes, without skips: a tile has 65,536 elements
    2 bitmap   a bit per element of the tile, lowest bit first
    3 dense    every element; nothing is stored

Value codes: what happens to them. A *step* is the distance between the old and the new bits in the order of the
numbers that they stand for, modulo the lane (1 is the next larger float); a bijection of all bit patterns, whatever
the old one, NaN payloads and negative zero included. In a *zigzag* the sign stands in the lowest bit.

    0 nibble   zigzag in 4 bits, low half first, 15 for an escape; an odd end is filled up with 0
    1 byte     zigzag in 8 bits, 255 for an escape
    2 whole    the step in a whole lane; in an overwrite the new bits themselves

An escape stands in the escape stream as a whole lane and would not have fitted. A step of 0 occurs in dense tiles only.
All integers are little-endian. The encoder takes the smallest form for each tile; on a tie the lower code.

Hash of a bucket: the sum modulo 2^64 of a 64-bit mix of (position in the bucket, bits) over its elements. It follows a
change in time proportional to the change, and tells which of two sets of weights is held. It is no defence against
somebody who chooses the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rose.errors import TransferError

TILE_ELEMENTS = 65536
BUCKET_BYTES_MAX = 64 * 2**20
LANES = (2, 4)
SKIP = 255
GAP8, GAP16, BITMAP, DENSE = range(4)
NIBBLE, BYTE, WHOLE = range(3)
ESCAPE_CODE = (15, 255)
"""The code that announces an escape, by value code; a zigzag step below it fits."""

Bits = NDArray[np.unsignedinteger[Any]]
Mode = Literal["steps", "overwrite"]


class MalformedDelta(TransferError):
    """The bytes are not a delta, or not the whole one: fetch it again."""


class WrongBase(TransferError):
    """The delta is sound, but not one from the weights that are held here."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Rows (arrays with one entry per tile) and streams (uint8) as described above."""

    shape: NDArray[np.uint32]
    index_bytes: NDArray[np.uint32]
    escapes: NDArray[np.uint32]
    check: NDArray[np.uint64]
    index: NDArray[np.uint8]
    values: NDArray[np.uint8]
    escape: NDArray[np.uint8]

    @property
    def counts(self) -> NDArray[np.uint32]:
        """Coded elements by tile."""
        return self.shape & np.uint32(0xFFFFF)

    @property
    def index_codes(self) -> NDArray[np.uint32]:
        return self.shape >> np.uint32(20) & np.uint32(0xF)

    @property
    def value_codes(self) -> NDArray[np.uint32]:
        return self.shape >> np.uint32(24)

    def value_bytes(self, lane: int) -> NDArray[np.uint32]:
        """Length of each tile's part of the value stream."""
        counts = self.counts
        return np.where(
            self.value_codes == NIBBLE,
            (counts + np.uint32(1)) // np.uint32(2),
            np.where(self.value_codes == BYTE, counts, counts * np.uint32(lane)),
        )

    def growth(self) -> int:
        """By how much the bucket's hash grows, for a delta of steps."""
        return int(np.add.reduce(self.check))


def tile_count(elements: int) -> int:
    return -(-elements // TILE_ELEMENTS)


def tile_lengths(elements: int) -> NDArray[np.uint32]:
    lengths = np.full(tile_count(elements), TILE_ELEMENTS, dtype=np.uint32)
    lengths[-1] = elements - (len(lengths) - 1) * TILE_ELEMENTS
    return lengths


def streams_bytes_max(elements: int, lane: int) -> int:
    """No encoder needs more for index, values and escapes together: every element, and a bit for each."""
    return elements * lane + tile_count(elements) * (TILE_ELEMENTS // 8)


def check_rows(streams: Streams, elements: int, lane: int) -> None:
    """Raises MalformedDelta unless the rows have known codes and cut the streams up without a gap or a rest."""
    if np.any(streams.counts > tile_lengths(elements)):
        raise MalformedDelta("a tile has more elements coded than there are")
    if np.any(streams.index_codes > DENSE) or np.any(streams.value_codes > WHOLE):
        raise MalformedDelta("a tile has an unknown code", expected="index codes 0 to 3 and value codes 0 to 2")
    for name, stream, sizes in (
        ("index", streams.index, streams.index_bytes),
        ("value", streams.values, streams.value_bytes(lane)),
        ("escape", streams.escape, streams.escapes * np.uint64(lane)),
    ):
        if (told := int(np.sum(sizes, dtype=np.uint64))) != stream.size:
            raise MalformedDelta(f"the {name} stream has {stream.size} bytes", expected=f"{told}, as the tiles say")


def as_bits(array: NDArray[Any]) -> Bits:
    """A flat view of the bits of `array` (bfloat16 is given as any 2-byte type).

    Raises ValueError unless it is contiguous, has elements of 2 or 4 bytes and is not empty or over 64 MiB.
    """
    lane = array.dtype.itemsize
    if lane not in LANES or not array.flags.c_contiguous or not 0 < array.nbytes <= BUCKET_BYTES_MAX:
        raise ValueError(
            f"a bucket of {array.nbytes} bytes in {array.dtype} elements"
            f"{'' if array.flags.c_contiguous else ', not contiguous'}; "
            f"it must be contiguous, of 2- or 4-byte elements, not empty and at most {BUCKET_BYTES_MAX} bytes"
        )
    return array.reshape(-1).view(f"<u{lane}")
