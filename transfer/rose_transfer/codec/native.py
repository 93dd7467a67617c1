"""The native kernels (transfer/native), called through ctypes, which lets other threads run meanwhile.

The library has no Python in it, so it needs no headers of Python to be built and fits every interpreter; it is built
with the package if there is a C compiler, and it picks instruction sets when it runs, not when it is built.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_transfer.codec.streams import (
    TILE_ELEMENTS,
    Bits,
    MalformedDelta,
    Mode,
    Streams,
    tile_count,
)

log = logging.getLogger(__name__)

ABI = 1
_LEVELS = ("scalar", "avx2", "avx512")
_FAULTS = (
    "",
    "its codes do not fit it",
    "its streams have the wrong size",
    "its positions are not those of elements",
    "it has a value that no encoder writes",
    "its check does not hold",
)
_NO_MEMORY = 6
_SLACK_BYTES = 64
_KEPT_BYTES = 8 * 2**20


class _Streams(ctypes.Structure):
    """`struct streams` of format.h."""

    _fields_ = (
        ("shape", ctypes.c_void_p),
        ("index_bytes", ctypes.c_void_p),
        ("escapes", ctypes.c_void_p),
        ("check", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("escape", ctypes.c_void_p),
        ("index_size", ctypes.c_uint64),
        ("values_size", ctypes.c_uint64),
        ("escape_size", ctypes.c_uint64),
    )


class NativeKernels:
    """The native kernels for one instruction set."""

    def __init__(self, library: ctypes.CDLL, level: int) -> None:
        self.name = _LEVELS[level]
        self._library = library
        self._level = level

    def tile_hashes(self, bits: Bits) -> NDArray[np.uint64]:
        hashes = np.empty(tile_count(bits.size), dtype=np.uint64)
        self._call("hash", bits.itemsize, _at(bits), _size(bits.size), _at(hashes))
        return hashes

    def encode(self, old: Bits | None, new: Bits, mode: Mode) -> Streams:
        described = _describe(_room.reserve(new.size, new.itemsize))
        self._call(
            "encode",
            new.itemsize,
            None if old is None else _at(old),
            _at(new),
            _size(new.size),
            int(mode == "overwrite"),
            ctypes.byref(described),
        )
        return _room.take(described)

    def inspect(self, streams: Streams, elements: int, lane: int, mode: Mode) -> tuple[int, str] | None:
        bad = ctypes.c_uint64()
        described = _describe(streams)
        fault = self._call(
            "inspect",
            lane,
            ctypes.byref(described),
            _size(elements),
            int(mode == "overwrite"),
            ctypes.byref(bad),
        )
        return (bad.value, _FAULTS[fault]) if fault else None

    def apply(
        self, streams: Streams, target: Bits, mode: Mode, *, backwards: bool, first: int, end: int, held_from: int = 0
    ) -> tuple[int, str] | None:
        bad = ctypes.c_uint64()
        described = _describe(streams)
        # Tiles before `first` are not touched: where the bucket would begin may be nobody's memory.
        before = held_from * TILE_ELEMENTS
        fault = self._call(
            "apply",
            target.itemsize,
            ctypes.byref(described),
            ctypes.c_void_p(target.ctypes.data - before * target.itemsize),
            _size(target.size + before),
            int(mode == "overwrite"),
            int(backwards),
            _size(first),
            _size(end),
            ctypes.byref(bad),
        )
        return (bad.value, _FAULTS[fault]) if fault else None

    def compose(self, first: Streams, second: Streams, elements: int, lane: int, mode: Mode) -> Streams:
        bad = ctypes.c_uint64()
        described = _describe(_room.reserve(elements, lane))
        one, other = _describe(first), _describe(second)
        fault = self._call(
            "compose",
            lane,
            ctypes.byref(one),
            ctypes.byref(other),
            _size(elements),
            int(mode == "overwrite"),
            ctypes.byref(described),
            ctypes.byref(bad),
        )
        if fault:
            raise MalformedDelta(f"tile {bad.value}: {_FAULTS[fault]}")
        return _room.take(described)

    def _call(self, function: str, lane: int, *arguments: Any) -> int:
        fault: int = self._library[f"rose_codec_{function}"](self._level, lane, *arguments)
        if fault == _NO_MEMORY:
            raise MemoryError("no memory for a tile of the delta codec")
        return fault


@cache
def native_kernels() -> tuple[NativeKernels, ...]:
    """One per instruction set that this machine has, slowest first; empty if the library was not built."""
    for file in sorted(Path(__file__).parent.glob("_native.*so")):
        try:
            library = ctypes.CDLL(str(file))
            if library.rose_codec_abi() != ABI:
                log.warning("the codec's native library is another version's; install rose again")
                continue
            return tuple(NativeKernels(library, level) for level in range(library.rose_codec_level() + 1))
        except (OSError, AttributeError) as error:
            log.warning("the codec's native library cannot be used: %s", error)
    return ()


class _Room(threading.local):
    """Each thread's room for the streams of a delta, kept from one to the next.

    To have the system give and clear memory anew takes longer than to fill what a sparse delta needs of it.
    """

    elements = 0
    lane = 0
    streams: Streams

    def reserve(self, elements: int, lane: int) -> Streams:
        """Room for any delta of such a bucket. What is never written takes no memory."""
        if (self.elements, self.lane) != (elements, lane):
            tiles = tile_count(elements)
            self.streams = Streams(
                np.empty(tiles, dtype=np.uint32),
                np.empty(tiles, dtype=np.uint32),
                np.empty(tiles, dtype=np.uint32),
                np.empty(tiles, dtype=np.uint64),
                np.empty(tiles * TILE_ELEMENTS // 8 + _SLACK_BYTES, dtype=np.uint8),
                np.empty(elements * lane + _SLACK_BYTES, dtype=np.uint8),
                np.empty(elements * lane + _SLACK_BYTES, dtype=np.uint8),
            )
            self.elements, self.lane = elements, lane
        return self.streams

    def take(self, described: _Streams) -> Streams:
        """A copy of what was written; the room is only kept if that was little."""
        sizes = (described.index_size, described.values_size, described.escape_size)
        full = self.streams
        taken = Streams(
            full.shape.copy(),
            full.index_bytes.copy(),
            full.escapes.copy(),
            full.check.copy(),
            *(stream[:size].copy() for stream, size in zip((full.index, full.values, full.escape), sizes, strict=True)),
        )
        if sum(sizes) > _KEPT_BYTES:
            self.elements = 0
            del self.streams
        return taken


_room = _Room()


def _describe(streams: Streams) -> _Streams:
    return _Streams(
        *(
            array.ctypes.data
            for array in (
                streams.shape,
                streams.index_bytes,
                streams.escapes,
                streams.check,
                streams.index,
                streams.values,
                streams.escape,
            )
        ),
        streams.index.size,
        streams.values.size,
        streams.escape.size,
    )


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _size(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)
