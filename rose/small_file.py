"""Files that a user names and that are read whole: tokens, certificates, configurations.

Reading ends: what is no regular file, or a larger one, is refused at once. A pipe or a device might never end.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SmallFile:
    """`mode` are the permission bits that the file had when it was read."""

    content: bytes
    mode: int


def read_small_file(file: Path, bytes_max: int, expected: str) -> SmallFile:
    """All of a file of at most `bytes_max` bytes. Raises ConfigError, which says what was `expected`."""
    try:
        # Not to wait for who writes to a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{file} cannot be read: it is no regular file", expected=expected)
            with open(descriptor, "rb", closefd=False) as opened:
                content = opened.read(bytes_max + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} cannot be read: {why}", expected=expected, to_do="check the path") from error
    if len(content) > bytes_max:
        raise ConfigError(f"{file} cannot be read: it has more than {bytes_max} bytes", expected=expected)
    return SmallFile(content, stat.S_IMODE(mode))
