"""One tile in NumPy: its hash, its smallest form, and back; the plain reading of what `streams` describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_transfer.codec.streams import (
    BITMAP,
    BYTE,
    DENSE,
    ESCAPE_CODE,
    GAP8,
    GAP16,
    NIBBLE,
    SKIP,
    TILE_ELEMENTS,
    WHOLE,
    Bits,
    Mode,
)

Positions = NDArray[np.int64]
Octets = NDArray[np.uint8]


class Unsound(Exception):
    """This tile cannot be unpacked, or does not hold what it says."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One row with its own parts of the streams."""

    count: int
    index_code: int
    value_code: int
    check: int
    index: Octets
    values: Octets
    escape: Octets


def element_hashes(tile: int, at: Positions, bits: Bits) -> NDArray[np.uint64]:
    """`element_hash` of format.h for elements `at` of a tile."""
    mixed = (at.astype(np.uint64) + np.uint64(tile * TILE_ELEMENTS)) << np.uint64(32) | bits.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def total(hashes: NDArray[np.uint64]) -> int:
    return int(np.add.reduce(hashes))


def ordered(bits: Bits) -> Bits:
    """Bits in the order of the numbers they stand for, and back: flip the others where the sign is set."""
    top = 8 * bits.itemsize - 1
    return bits ^ ((bits >> bits.dtype.type(top)) * bits.dtype.type(2**top - 1))


def _zigzag(step: Bits) -> Bits:
    top = step.dtype.type(8 * step.itemsize - 1)
    return (step << step.dtype.type(1)) ^ ((step >> top) * np.iinfo(step.dtype).max)


def _unzigzag(code: Bits) -> Bits:
    one = code.dtype.type(1)
    return (code >> one) ^ ((code & one) * np.iinfo(code.dtype).max)


def _octets(array: NDArray[Any]) -> Octets:
    return np.ascontiguousarray(array).view(np.uint8)


def pack(at: Positions, step: Bits, n: int, mode: Mode, check: int) -> Tile:
    k, lane = at.size, step.itemsize
    zigzag = _zigzag(step)
    wide = [int(np.count_nonzero(zigzag >= code)) for code in ESCAPE_CODE]
    if mode == "overwrite":
        dense_code = value_code = WHOLE
        dense_cost = cost = k * lane
    else:
        value_code, cost = _cheapest(k, wide, lane)
        dense_code, dense_cost = _cheapest(n, wide, lane)
    gaps = np.diff(at, prepend=-1) - 1
    bitmap = -(-n // 8)
    costs = [(k + int(np.sum(gaps // SKIP)), GAP8), (2 * k, GAP16), (bitmap, BITMAP)]
    index_bytes, index_code = min(costs)
    if k > 0 and dense_cost < index_bytes + cost and (mode == "steps" or k == n):
        index_code, value_code = DENSE, dense_code
        spread = np.zeros(n, dtype=step.dtype)
        spread[at] = step
        step, k = spread, n
        zigzag = _zigzag(step)
    index = _write_index(index_code, at, gaps, n)
    if value_code == WHOLE:
        return Tile(k, index_code, value_code, check, index, _octets(step), _octets(step[:0]))
    threshold = ESCAPE_CODE[value_code]
    codes = np.minimum(zigzag, step.dtype.type(threshold)).astype(np.uint8)
    if value_code == NIBBLE:
        codes = np.append(codes, np.zeros(k % 2, dtype=np.uint8))
        codes = codes[0::2] | codes[1::2] << np.uint8(4)
    return Tile(k, index_code, value_code, check, index, codes, _octets(step[zigzag >= threshold]))


def _cheapest(k: int, wide: list[int], lane: int) -> tuple[int, int]:
    """(value code, bytes) for `k` steps of which `wide[code]` need an escape."""
    costs = [(-(-k // 2) + lane * wide[NIBBLE], NIBBLE), (k + lane * wide[BYTE], BYTE), (k * lane, WHOLE)]
    cost, code = min(costs)
    return code, cost


def _write_index(code: int, at: Positions, gaps: Positions, n: int) -> Octets:
    if code == GAP8:
        skips = gaps // SKIP
        written = np.full(at.size + int(np.sum(skips)), SKIP, dtype=np.uint8)
        written[np.arange(at.size) + np.cumsum(skips)] = gaps % SKIP
        return written
    if code == GAP16:
        return _octets(gaps.astype("<u2"))
    if code == DENSE:
        return np.empty(0, dtype=np.uint8)
    set_bits = np.zeros(n, dtype=np.uint8)
    set_bits[at] = 1
    return np.packbits(set_bits, bitorder="little")


def unpack(part: Tile, n: int, lane: int, mode: Mode) -> tuple[Positions, Bits]:
    """Positions and steps (overwrite: bits) of a tile; raises Unsound."""
    if part.count > n or part.index_code > DENSE or part.value_code > WHOLE:
        raise Unsound("its codes do not fit it")
    if mode == "overwrite" and part.count > 0 and part.value_code != WHOLE:
        raise Unsound("its codes do not fit it")
    at = _read_index(part, n)
    if at.size != part.count or (at.size and at[-1] >= n):
        raise Unsound("its positions are not those of elements")
    step = _read_values(part, lane)
    if mode == "steps" and part.index_code != DENSE and np.any(step == 0):
        raise Unsound("it has a value that no encoder writes")
    return at, step


def _read_index(part: Tile, n: int) -> Positions:
    sizes = {GAP16: 2 * part.count, BITMAP: -(-n // 8), DENSE: 0}
    if part.index.size != sizes.get(part.index_code, part.index.size) or (part.index_code == DENSE and part.count != n):
        raise Unsound("its streams have the wrong size")
    if part.index_code == DENSE:
        return np.arange(n, dtype=np.int64)
    if part.index_code == BITMAP:
        return np.flatnonzero(np.unpackbits(part.index, bitorder="little"))
    if part.index_code == GAP16:
        return _reached(part.index.view("<u2").astype(np.int64) + 1)
    if part.index.size and part.index[-1] == SKIP:
        raise Unsound("its streams have the wrong size")
    is_element: NDArray[np.bool_] = part.index != SKIP
    return _reached(part.index.astype(np.int64) + is_element)[is_element]


def _reached(strides: Positions) -> Positions:
    """Where each stride ends, if the first one begins before the tile."""
    ends: Positions = np.cumsum(strides)
    ends -= 1
    return ends


def _read_values(part: Tile, lane: int) -> Bits:
    escape: Bits = part.escape.view(f"<u{lane}")
    if part.value_code == WHOLE:
        if escape.size:
            raise Unsound("it has a value that no encoder writes")
        return part.values.view(f"<u{lane}")
    codes = part.values
    if part.value_code == NIBBLE:
        codes = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), axis=1).reshape(-1)
        if np.any(codes[part.count :]):
            raise Unsound("it has a value that no encoder writes")
        codes = codes[: part.count]
    threshold = ESCAPE_CODE[part.value_code]
    escaped = codes == threshold
    if np.count_nonzero(escaped) != escape.size or np.any(_zigzag(escape) < threshold):
        raise Unsound("it has a value that no encoder writes")
    step = _unzigzag(codes.astype(f"<u{lane}"))
    step[escaped] = escape
    return step


def merge(first: tuple[Positions, Bits], second: tuple[Positions, Bits], mode: Mode) -> tuple[Positions, Bits]:
    """The elements of both; where both have one, the sum of their steps or the later bits."""
    at = np.union1d(first[0], second[0])
    step = np.zeros(at.size, dtype=first[1].dtype)
    step[np.searchsorted(at, first[0])] = first[1]
    if mode == "overwrite":
        step[np.searchsorted(at, second[0])] = second[1]
        return at, step
    step[np.searchsorted(at, second[0])] += second[1]
    moved = step != 0
    return at[moved], step[moved]
