"""JSON of which each value has exactly one text, and a reader that believes nothing.

The text has sorted keys, no spaces and no floats. Whoever parses one builds a value from it and writes that again: if
the bytes differ (a doubled or unknown key, 1.0 for 1, a space), `check` refuses it.
"""

from __future__ import annotations

import json
from typing import Any

from rose.errors import TransferError

TEXT_BYTES_MAX = 64 * 2**20
"""A packing of 100,000 tensors takes some 20 MiB."""


class MalformedRecord(TransferError):
    """The bytes are not such a record, or not the whole one: fetch it again."""


def dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def load(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises MalformedRecord, whatever the bytes are."""
    if len(data) > TEXT_BYTES_MAX:
        raise MalformedRecord(f"{len(data)} bytes are no {what}", expected=f"at most {TEXT_BYTES_MAX}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(what, error) from error
    if not isinstance(value, dict):
        raise MalformedRecord(f"this is no {what}, but a {type(value).__name__}")
    return value


def check(written_again: bytes, data: bytes, what: str) -> None:
    """Raises MalformedRecord unless `data` is the one text of its value."""
    if written_again != data:
        raise MalformedRecord(f"this {what} is not written as one is", expected="canonical JSON of known keys")


def malformed(what: str, error: Exception) -> MalformedRecord:
    return MalformedRecord(f"this is no {what}: {type(error).__name__}: {error}", to_do="fetch it again")


def number(value: Any, limit: int = 2**63) -> int:
    """A whole number from 0 up to but not including `limit`, else TypeError."""
    if type(value) is not int or not 0 <= value < limit:
        raise TypeError(f"{value!r} is not a whole number below {limit}")
    return value


def text(value: Any) -> str:
    """A string, else TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
