"""Reads and writes of a small file that keep the interpreter's lock.

Python's own give the lock away for the call, and whoever takes it keeps it for up to its switch interval, 5 ms: a
scheduler that looks at the board would wait for the engine's other threads in each step. Meant for files that the
kernel has in memory, where a call takes a microsecond.
"""

from __future__ import annotations

import ctypes
import errno
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.pread.argtypes = _libc.pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pread.restype = _libc.pwrite.restype = ctypes.c_ssize_t


class QuickReader:
    """Reads up to `size_bytes` of a file in one call; not for several threads at once."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._buffer = ctypes.create_string_buffer(size_bytes)
        self._address = ctypes.addressof(self._buffer)
        self._view = memoryview(self._buffer)

    def read(self, fd: int, offset: int = 0) -> bytes:
        """What stands from `offset` on, less where the file ends before. Raises OSError."""
        read = _libc.pread(fd, self._address, self._size_bytes, offset)
        if read < 0:
            raise _error()
        return self._view[:read].tobytes()


def write_at(fd: int, data: bytes, offset: int) -> None:
    """All of it in one call. Raises OSError, also where the file system took a part alone: it has no room for more."""
    written = _libc.pwrite(fd, data, len(data), offset)
    if written < 0:
        raise _error()
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
