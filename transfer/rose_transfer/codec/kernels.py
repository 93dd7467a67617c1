"""The work on streams, done by a native library or by NumPy: same bytes, other speed.

Arrays are what `as_bits` gives; deltas are whole buckets. Nothing here keeps state.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rose_transfer.codec.streams import Bits, Mode, Streams

log = logging.getLogger(__name__)


class Kernels(Protocol):
    """One implementation. A tile at fault is reported as (tile, what is wrong with it)."""

    name: str

    def tile_hashes(self, bits: Bits) -> NDArray[np.uint64]: ...

    def encode(self, old: Bits | None, new: Bits, mode: Mode) -> Streams:
        """Without `old` (an overwrite) every element is coded."""
        ...

    def inspect(self, streams: Streams, elements: int, lane: int, mode: Mode) -> tuple[int, str] | None:
        """The first tile that cannot be unpacked, or (overwrite) has not the hash of its check."""
        ...

    def apply(
        self, streams: Streams, target: Bits, mode: Mode, *, backwards: bool, first: int, end: int, held_from: int = 0
    ) -> tuple[int, str] | None:
        """Apply tiles `first` up to `end`; the first one whose check does not hold is not written, nor any after it.

        `target` is the bucket from tile `held_from` on, at least up to `end`.
        """
        ...

    def compose(self, first: Streams, second: Streams, elements: int, lane: int, mode: Mode) -> Streams:
        """Raises MalformedDelta if a tile cannot be unpacked."""
        ...


@cache
def best_kernels() -> Kernels:
    """The fastest kernels that this machine has; says so once if those are NumPy's."""
    from rose_transfer.codec.native import native_kernels
    from rose_transfer.codec.numpy_kernels import NumpyKernels

    found = native_kernels()
    if found:
        return found[-1]
    log.warning(
        "the delta codec runs on NumPy, many times slower: its native library was not built or does not fit; "
        "install a C compiler, then rose again"
    )
    return NumpyKernels()
