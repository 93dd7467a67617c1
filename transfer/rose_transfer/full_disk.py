"""Which failures of a disk mean that it is full."""

from __future__ import annotations

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Whether there is no room on the disk, in a quota, or in a file that may be only so large."""
    return error.errno in _FULL
