"""A file that an object is fetched into, piece by piece, and that knows after a kill how far it came.

    the object's bytes, its whole room reserved | size | bytes complete from the start on      (8 bytes each)

Invariants
- What is said to be complete was written before it was said. A killed process loses neither; a loss of power may lose
  the bytes and not the saying, so whoever takes the object compares its hash.
- A full disk is an error before the first byte, never a signal in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.store.files import check_file, disk_trouble

_TRAILER = struct.Struct("<QQ")
_BLOCK_BYTES = 4096


def room_bytes(size_bytes: int) -> int:
    """What the arrival of an object of that size takes of a disk, in whole blocks."""
    return -(-(size_bytes + _TRAILER.size) // _BLOCK_BYTES) * _BLOCK_BYTES


class Arrival:
    """A `Landing` in the file at `path`; `complete_bytes` are there from an earlier attempt at most `bytes_max` long.

    Raises TransferError if the disk fails.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._file: mmap.mmap | None = None
        self._size, self._complete = self._look()

    @property
    def complete_bytes(self) -> int:
        return self._complete

    @complete_bytes.setter
    def complete_bytes(self, complete: int) -> None:
        self._complete = complete
        if self._file is not None:
            _TRAILER.pack_into(self._file, self._size, self._size, complete)

    def room(self, size_bytes: int) -> memoryview:
        """Raises NoRoom, or TransferError if the object is larger than it may be."""
        if self._file is None:
            if size_bytes > self._bytes_max:
                raise TransferError(
                    f"object {self._path.name[:12]} has {size_bytes} bytes", expected=f"at most {self._bytes_max}"
                )
            self._file = self._map(size_bytes)
            self._size = size_bytes
        return memoryview(self._file)[:size_bytes]

    def finish(self) -> None:
        """Leave the object alone in the file, all of it having arrived. Raises TransferError if the disk fails."""
        self._file = None
        with disk_trouble(f"{self._path} cannot be finished"):
            os.truncate(self._path, self._size)

    def _look(self) -> tuple[int, int]:
        with disk_trouble(f"{self._path} cannot be read"):
            try:
                check_file(self._path)
                with self._path.open("rb") as file:
                    whole = os.fstat(file.fileno()).st_size - _TRAILER.size
                    if whole < 0:
                        return 0, 0
                    file.seek(whole)
                    size, complete = _TRAILER.unpack(file.read(_TRAILER.size))
            except FileNotFoundError:
                return 0, 0
        return (size, complete) if size == whole and complete <= size else (0, 0)

    def _map(self, size_bytes: int) -> mmap.mmap:
        length = size_bytes + _TRAILER.size
        with disk_trouble(f"{self._path} cannot be made for what arrives", room_bytes(size_bytes)):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, length)
                os.posix_fallocate(descriptor, 0, length)
                return mmap.mmap(descriptor, length)
            finally:
                os.close(descriptor)
