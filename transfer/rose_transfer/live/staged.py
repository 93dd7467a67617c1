"""The deltas of a way between its stage and its commit: where nobody else reaches them.

Invariants
- A way is kept in memory as long as it and the object that is read take `MEMORY_BYTES_MAX` together. A longer one lies
  in a file without a name, in full: removing, cutting or changing the objects that it came from does not touch it, and
  it ends with the process.
- What `put` accepted has reached the disk when `seal` returns: a disk that is full or fails says so at the stage.
- What `get` returns is what was put, or it raises: what the file gives is compared by its hash.

A delta is put in parts, which take no room beside each other once the file is there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_transfer.codec import Delta
from rose_transfer.codec.streams import Streams
from rose_transfer.store.files import DRAFT_PREFIX, disk_trouble

MEMORY_BYTES_MAX = 64 * 2**20
_ARRAYS = tuple(field.name for field in fields(Streams))
Place = tuple[int, int]
"""Number of the step and place of the bucket."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """A part in the file: its arrays one behind the other, so many elements of each."""

    offset: int
    lengths: tuple[int, ...]
    hash: int


class StagedDeltas:
    """Room for the deltas of a way; the file, if one is needed, lies on the disk of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heads: dict[Place, Delta] = {}
        self._kept: dict[Place, list[Streams]] = {}
        self._kept_bytes = 0
        self._kept_bytes_max = 0
        self._extents: dict[Place, list[_Extent]] = {}
        self._file: IO[bytes] | None = None
        self._end = 0

    def make_room(self, object_bytes: int) -> None:
        """For the object of the next delta, which is in memory beside what is kept. Raises as `put` does."""
        self._kept_bytes_max = MEMORY_BYTES_MAX - object_bytes
        self._keep_or_move()

    def put(self, place: Place, head: Delta, parts: Iterable[Streams]) -> None:
        """A delta with what `head` says, and the streams of `parts`, those of tiles that follow each other.

        Raises NoRoom, or TransferError if the disk fails.
        """
        self._heads[place] = replace(head, streams=_NOTHING)
        for part in parts:
            self._kept.setdefault(place, []).append(part)
            self._kept_bytes += sum(array.nbytes for array in _arrays(part))
            self._keep_or_move()

    def seal(self) -> None:
        """Nothing more is put. Raises as `put` does."""
        if self._file is not None:
            with self._trouble("written"):
                os.fdatasync(self._file.fileno())

    def get(self, place: Place) -> Delta:
        """Raises TransferError if the disk fails, or gives other bytes than were put."""
        kept = self._kept.get(place)
        return replace(self._heads[place], streams=self._read(self._extents[place]) if kept is None else _joined(kept))

    def close(self) -> None:
        """Give the memory, and the room on the disk, back."""
        self._heads.clear()
        self._kept.clear()
        self._extents.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep_or_move(self) -> None:
        """Once there is a file nothing is kept: its parts would not follow each other."""
        if self._file is None and self._kept_bytes <= self._kept_bytes_max:
            return
        with self._trouble("written"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix=DRAFT_PREFIX, dir=self._folder, buffering=0)  # noqa: SIM115
            for place in tuple(self._kept):
                for part in self._kept.pop(place):
                    self._extents.setdefault(place, []).append(self._write(self._file.fileno(), part))

    def _write(self, file: int, part: Streams) -> _Extent:
        offset, digest = self._end, xxhash.xxh3_64()
        for array in _arrays(part):
            rest = np.ascontiguousarray(array).data.cast("B")
            digest.update(rest)
            while rest:
                written = os.pwrite(file, rest, self._end)
                self._end, rest = self._end + written, rest[written:]
        return _Extent(offset, tuple(array.size for array in _arrays(part)), digest.intdigest())

    def _read(self, extents: Sequence[_Extent]) -> Streams:
        assert self._file is not None
        totals = [sum(column) for column in zip(*(extent.lengths for extent in extents), strict=True)]
        whole = [np.empty(total, like.dtype) for total, like in zip(totals, _arrays(_NOTHING), strict=True)]
        at = [0] * len(whole)
        for extent in extents:
            ends = [start + length for start, length in zip(at, extent.lengths, strict=True)]
            parts = [array[start:end].data.cast("B") for array, start, end in zip(whole, at, ends, strict=True)]
            with self._trouble("read"):
                size = os.preadv(self._file.fileno(), parts, extent.offset)
            digest = xxhash.xxh3_64()
            for part in parts:
                digest.update(part)
            if (size, digest.intdigest()) != (sum(part.nbytes for part in parts), extent.hash):
                raise TransferError(f"what is staged in {self._folder} is not what it was", to_do="look at the disk")
            at = ends
        return Streams(**dict(zip(_ARRAYS, whole, strict=True)))

    def _trouble(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return disk_trouble(f"what is staged in {self._folder} cannot be {doing}")


def _arrays(streams: Streams) -> tuple[NDArray[Any], ...]:
    return tuple(getattr(streams, name) for name in _ARRAYS)


def _joined(parts: Sequence[Streams]) -> Streams:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(_arrays(part) for part in parts), strict=True)
    return Streams(**{name: np.concatenate(column) for name, column in zip(_ARRAYS, columns, strict=True)})


_NO_ROWS, _NO_BYTES = np.empty(0, np.uint32), np.empty(0, np.uint8)
_NOTHING = Streams(_NO_ROWS, _NO_ROWS, _NO_ROWS, np.empty(0, np.uint64), _NO_BYTES, _NO_BYTES, _NO_BYTES)
