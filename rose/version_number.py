"""What is the number of a version, and what only looks like one."""

from __future__ import annotations

import operator

from rose.errors import TransferError


def version_number(version: object) -> int:
    """As trainers count them, also in integers of their libraries. Raises TransferError if `version` is none."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise TransferError(f"{version!r} is no number of a version", expected="an integer from 0 to below 2^63")
    return number
