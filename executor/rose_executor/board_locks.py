"""The kernel's locks on the halves of a board: a half has no second writer, and a dead one lets go.

Invariants
- A lock is its process's alone. What that forks would keep it, and go on being taken for the writer after its parent's
  death: the child's end of the board is a nothing that takes every write and holds nothing. Who forks without Python
  keeps it.
- Nothing here waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any

from rose.errors import ClusterError
from rose_executor.board_halves import HALF_BYTES, Half

# struct flock of 64-bit Linux: type, whence, start, length, pid (0 for a lock of an open file description).
_FLOCK = struct.Struct("hhqqi4x")
_File = tuple[int, int]

_held: dict[int, _File] = {}


def lock_half(fd: int, path: Path, half: Half[Any]) -> None:
    """Until `close_locked`, or the end of this process. Raises ClusterError if somebody else holds it."""
    found = os.fstat(fd)
    _held[fd] = found.st_dev, found.st_ino  # before there is a lock: another thread may fork at any time
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, half.offset, HALF_BYTES, 0))
    except OSError as error:
        del _held[fd]
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise ClusterError(f"cannot lock the {half.name} half of {path}: {error.strerror}") from error
        raise ClusterError(
            f"the {half.name} half of the board {path} has a live writer",
            expected="one of each per device",
            to_do="end the other one, or give this one a board of its own",
        ) from error


def close_locked(fd: int) -> None:
    """Close a descriptor, with whatever lock it holds."""
    _held.pop(fd, None)
    os.close(fd)


def has_writer(fd: int, half: Half[Any]) -> bool:
    """Whether a process holds the lock of a half, as the kernel says; also of a file that is open for reading alone."""
    try:
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, half.offset, HALF_BYTES, 0)
        found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    except OSError:
        return False
    return found == fcntl.F_WRLCK


def _let_go_of_inherited() -> None:
    for fd, file in tuple(_held.items()):
        # A child that has no descriptor left holds the lock on; it must not die of that.
        with contextlib.suppress(OSError):
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) == file:
                # Whoever has the number closes it some day: it must not be that of another file by then.
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, fd, inheritable=False)
                os.close(nothing)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_of_inherited)
