"""Where fetched bytes are put: the caller's memory, memory of our own, or a file.

Invariants
- A size is what a server says: one that cannot be is an error of ours, before anything of that size is made.
- A file's whole room is reserved on disk before its first byte is written: a full disk is an error in `room`, never
  a signal in the middle of a copy. Whatever else is wrong with the disk is not told as if it were full.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

from rose.errors import TransferError
from rose_transfer.full_disk import is_full


class MemoryLanding:
    """Lands in `buffer`, which must have exactly the object's size, or, if None, in memory made to measure.

    That is at most `bytes_max` bytes, None for what there is memory for.
    """

    def __init__(self, buffer: memoryview | bytearray | None = None, *, bytes_max: int | None = None) -> None:
        self.complete_bytes = 0
        self._bytes_max = bytes_max
        self._view = None if buffer is None else memoryview(buffer).cast("B")

    def room(self, size_bytes: int) -> memoryview:
        if self._view is None:
            self._view = self._memory(size_bytes)
        if self._view.nbytes != size_bytes:
            raise TransferError(
                f"an object of {size_bytes} bytes for a buffer of {self._view.nbytes}",
                expected="equal sizes",
                to_do="take the size from the manifest",
            )
        return self._view

    def _memory(self, size_bytes: int) -> memoryview:
        if self._bytes_max is not None and size_bytes > self._bytes_max:
            raise TransferError(f"an object of {size_bytes} bytes", expected=f"at most {self._bytes_max}")
        try:
            # Pages of a fresh map are touched once, by the bytes themselves; a bytearray would be zeroed first.
            return memoryview(mmap.mmap(-1, size_bytes) if size_bytes else bytearray())
        except (OSError, OverflowError) as error:
            raise TransferError(f"no memory for {size_bytes} bytes: {error}", to_do="fetch it into a file") from error

    @property
    def bytes_view(self) -> memoryview:
        """What landed; empty before a fetch."""
        return memoryview(b"") if self._view is None else self._view


class FileLanding:
    """Lands in the file at `path`, which is made or brought to the object's size; bytes already there stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complete_bytes = 0
        self._view: memoryview | None = None

    def room(self, size_bytes: int) -> memoryview:
        if self._view is None:
            self._view = self._map(size_bytes)
        return self._view

    def _map(self, size_bytes: int) -> memoryview:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, size_bytes)
                if not size_bytes:
                    return memoryview(bytearray())
                os.posix_fallocate(descriptor, 0, size_bytes)
                return memoryview(mmap.mmap(descriptor, size_bytes))
            finally:
                os.close(descriptor)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and not is_full(error):
                raise TransferError(
                    f"nothing can be put at {self.path}: {error}", to_do="look at that folder, or choose another one"
                ) from error
            free = shutil.disk_usage(self.path.parent).free if self.path.parent.is_dir() else 0
            raise TransferError(
                f"no room for {size_bytes} bytes at {self.path}: {error}",
                expected=f"{size_bytes} bytes free, there are {free}",
                to_do="free space or choose another folder",
            ) from error
