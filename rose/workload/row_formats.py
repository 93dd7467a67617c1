"""The columns of known CSV traces, the keys of known JSONL traces, and what one row of each means.

Invariants
- A format is known by its columns or keys alone, never by a file's name.
- A row is a request, or a failed request (no token in or out) that a public trace keeps and a replay leaves out, or
  a ValueError that says what is wrong. In our own format, which we write, a failed request is an error too.
- Columns that say nothing of arrival, length or shared prefixes (clients, sessions, models) are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rose.workload.trace import TraceRequest

Row = Mapping[str, Any]
_BLOCKS = re.compile(r"prefix_blocks_([1-9][0-9]{0,4})")
_OWN_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A row as it stands: its time may be absolute, its lengths may be 0."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        return self.prompt_tokens == 0 or self.output_tokens == 0

    def request(self, begin_s: float) -> TraceRequest:
        """Raises ValueError if this is no request of a trace that begins at `begin_s`."""
        return TraceRequest(self.time_s - begin_s, self.prompt_tokens, self.output_tokens, self.prefix_blocks)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """`absolute`: times are of a calendar, and the first request is the beginning. `strict`: no request may be a
    failed one.
    """

    name: str
    read: Callable[[Row], RawRequest]
    block_tokens: int = 0
    absolute: bool = False
    strict: bool = False


def csv_format(columns: tuple[str, ...]) -> RowFormat:
    """Columns are in lower case, here and in rows. Raises ValueError if no known format has these."""
    if set(columns) & set(_OWN_COLUMNS):
        return _own_format(columns)
    for needed, found in _CSV_FORMATS:
        if {column.lower() for column in needed} <= set(columns):
            return found
    described = "; ".join(f"{found.name}: {','.join(needed)}" for needed, found in _CSV_FORMATS)
    raise ValueError(f"columns {','.join(columns)[:200]!r} of no known trace ({','.join(_OWN_COLUMNS)}; {described})")


def jsonl_format(keys: set[str]) -> RowFormat:
    """Raises ValueError if no known format has these keys."""
    missing = missing_keys(keys)
    if missing:
        raise ValueError(f"no {' and no '.join(missing)}, which Mooncake's and Bailian's traces have")
    return _BAILIAN if {"chat_id", "parent_chat_id"} & keys else _MOONCAKE


def missing_keys(keys: set[str] | Row) -> list[str]:
    """Which keys that every row of a JSONL trace must have are not there."""
    return [key for key in ("timestamp", "input_length", "output_length") if key not in keys]


def _own_format(columns: tuple[str, ...]) -> RowFormat:
    missing = [column for column in _OWN_COLUMNS if column not in columns]
    if missing:
        raise ValueError(f"no column {' and no '.join(missing)}")
    blocks = [column for column in columns if _BLOCKS.fullmatch(column)]
    unknown = [column for column in columns if column not in (*_OWN_COLUMNS, *blocks, "client_id")]
    if unknown or len(blocks) > 1 or len(set(columns)) < len(columns):
        raise ValueError(
            f"columns {','.join(columns)[:200]!r}, not {','.join(_OWN_COLUMNS)} and perhaps prefix_blocks_N, client_id"
        )
    if not blocks:
        return RowFormat("rose", _read_own, strict=True)
    (column,) = blocks
    size = int(column.removeprefix("prefix_blocks_"))
    return RowFormat("rose", lambda row: _read_own(row, column), block_tokens=size, strict=True)


def _read_own(row: Row, blocks: str | None = None) -> RawRequest:
    prefix = () if blocks is None else tuple(_whole(blocks, block) for block in row[blocks].split())
    return RawRequest(
        _number("arrival_s", row["arrival_s"]),
        _whole("prompt_tokens", row["prompt_tokens"]),
        _whole("output_tokens", row["output_tokens"]),
        prefix,
    )


def _read_azure(row: Row) -> RawRequest:
    return RawRequest(
        _moment("timestamp", row["timestamp"]),
        _whole("contexttokens", row["contexttokens"]),
        _whole("generatedtokens", row["generatedtokens"]),
    )


def _read_burstgpt(row: Row) -> RawRequest:
    return RawRequest(
        _number("timestamp", row["timestamp"]),
        _whole("request tokens", row["request tokens"]),
        _whole("response tokens", row["response tokens"]),
    )


def _read_mooncake(row: Row) -> RawRequest:
    return _read_hashed(row, 1e-3)


def _read_bailian(row: Row) -> RawRequest:
    return _read_hashed(row, 1.0)


def _read_hashed(row: Row, unit_s: float) -> RawRequest:
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list):
        raise ValueError(f"hash_ids is {str(hashes)[:40]!r}, not a list")
    return RawRequest(
        _number("timestamp", row["timestamp"]) * unit_s,
        _whole("input_length", row["input_length"]),
        _whole("output_length", row["output_length"]),
        tuple(_whole("hash_ids", one) for one in hashes),
    )


_CSV_FORMATS = (
    (
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        RowFormat("Azure LLM inference", _read_azure, absolute=True),
    ),
    (("Timestamp", "Request tokens", "Response tokens"), RowFormat("BurstGPT", _read_burstgpt)),
)
_MOONCAKE = RowFormat("Mooncake", _read_mooncake, block_tokens=512)
_BAILIAN = RowFormat("Qwen-Bailian", _read_bailian, block_tokens=16)


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) and "_" not in value:
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {str(value)[:40]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {str(value)[:40]}, not a finite number")
    return number


def _whole(name: str, value: Any) -> int:
    """Also of `12.0`, which is what a column of whole numbers becomes where one of them is missing."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    number = _number(name, value)
    if not number.is_integer():
        raise ValueError(f"{name} is {str(value)[:40]}, not a whole number")
    return int(number)


def _moment(name: str, value: Any) -> float:
    """Seconds on the calendar. A time without a zone is taken as UTC; only differences matter."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {str(value)[:40]!r}, not a time like 2023-11-16 18:15:46.6805900") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
