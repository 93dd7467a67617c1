"""A delta that overwrites a bucket, turned into steps from what is held: shorter where that is near, and undoable.

Memory: the steps, and the new weights, of `TILES_AT_ONCE` tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_transfer.codec import Delta, MalformedDelta
from rose_transfer.codec.kernels import best_kernels
from rose_transfer.codec.streams import TILE_ELEMENTS, Streams

TILES_AT_ONCE = 16


def rebased(anew: Delta, held: NDArray[np.unsignedinteger[Any]]) -> tuple[Delta, Iterator[Streams]]:
    """The steps from `held` to the bucket that `anew`, an overwrite of every element, leaves.

    As a delta that still has the streams of `anew`, and its own, a part of its tiles after the other. Raises
    MalformedDelta if `anew` does not leave what it says.
    """
    hashes = best_kernels().tile_hashes(held)
    if anew.streams.growth() != anew.after:
        raise MalformedDelta("a bucket written whole does not become what it says", to_do="publish the version again")
    head = replace(anew, mode="steps", before=int(np.add.reduce(hashes)))
    return head, _parts(anew, held, anew.streams.check - hashes)


def _parts(anew: Delta, held: NDArray[np.unsignedinteger[Any]], growth: NDArray[np.uint64]) -> Iterator[Streams]:
    kernels = best_kernels()
    room = np.empty(min(TILES_AT_ONCE * TILE_ELEMENTS, held.size), dtype=held.dtype)
    for first in range(0, anew.tiles, TILES_AT_ONCE):
        end = min(first + TILES_AT_ONCE, anew.tiles)
        old = held[first * TILE_ELEMENTS : end * TILE_ELEMENTS]
        new = room[: old.size]
        anew.apply_tiles(new, first, end, held_from=first)
        # Hashes count from the beginning of the bucket; those of the part count from its own.
        yield replace(kernels.encode(old, new, "steps"), check=growth[first:end])
