"""Reads a trace from a file, plain or gzip, in any known format; `row_formats.py` knows those.

Invariants
- Content decides, never the name; only a name that ends in `.gz` must keep its word.
- A file that cannot be used is a ConfigError with the file, the line where there is one, what was expected and what
  to do. Memory is bounded by LINE_BYTES_MAX and REQUESTS_MAX, whatever the file holds.
- Failed requests of public traces are left out, and the trace's history says how many.
"""

from __future__ import annotations

import csv
import gzip
import json
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, NoReturn, cast

from rose.errors import ConfigError
from rose.workload.row_formats import Row, RowFormat, csv_format, jsonl_format, missing_keys
from rose.workload.trace import Trace, TraceRequest, in_order

LINE_BYTES_MAX = 2**20
REQUESTS_MAX = 2_000_000
_GZIP_MAGIC = b"\x1f\x8b"
_LFS_POINTER = b"version https://git-lfs.github.com/"
_FORMATS = "a trace as CSV (our own, Azure's, BurstGPT's) or JSONL (Mooncake's, Qwen-Bailian's), plain or gzip"


def read_trace(path: Path, *, name: str | None = None, attribution: str = "") -> Trace:
    """The trace in `path`, called by the file's name unless `name` is given.

    Raises ConfigError if the file cannot be read, is in no known format, or has a row that is wrong.
    """
    lines = _Lines(path)
    try:
        with lines:
            found, requests, failed = _read_rows(lines)
    except (OSError, EOFError, zlib.error) as error:
        lines.refuse(f"damaged or unreadable: {error}", "fetch the file again")
    history = []
    if failed:
        history.append(f"left out {failed} failed requests, which have no prompt or no answer")
    ordered = in_order(requests)
    return Trace(
        name if name is not None else path.name.removesuffix(".gz").rpartition(".")[0] or path.name,
        attribution or f"{found.name} format, from {path.name}",
        ordered,
        ordered[-1].arrival_s,
        block_tokens=found.block_tokens,
        history=tuple(history),
    )


class _Lines:
    """The lines of a file, and which one is being read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.number = 0
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> _Lines:
        self._stream = _open(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stream is not None
        self._stream.close()

    def __iter__(self) -> Iterator[str]:
        """Lines that are not blank. Raises ConfigError for one that is no text, or longer than any row can be."""
        assert self._stream is not None
        while line := self._stream.readline(LINE_BYTES_MAX + 1):
            self.number += 1
            if self.number == 1 and line.startswith(_LFS_POINTER):
                self.refuse("a Git LFS pointer, not the trace itself", "run git lfs pull, or download the file itself")
            if len(line) > LINE_BYTES_MAX:
                self.refuse(f"a row of more than {LINE_BYTES_MAX} bytes", f"give {_FORMATS}")
            try:
                text = line.decode("utf-8-sig" if self.number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                self.refuse("not a text file", f"give {_FORMATS}")
            if text:
                yield text

    def refuse(self, why: str, to_do: str = "mend or remove the row") -> NoReturn:
        place = f"{self._path}, line {self.number}" if self.number else f"{self._path}"
        raise ConfigError(f"{place}: {why[:1000]}", expected=_FORMATS, to_do=to_do) from None


def _open(path: Path) -> IO[bytes]:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}", expected=_FORMATS, to_do="name a trace file that exists") from error
    if not stat.S_ISREG(mode):
        # A pipe would be waited on for ever.
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise ConfigError(f"{path}: {kind}", expected=_FORMATS, to_do="name the trace file itself")
    try:
        stream = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", expected=_FORMATS, to_do="make the file readable") from error
    magic = stream.read(len(_GZIP_MAGIC))
    if magic == _GZIP_MAGIC:
        stream.close()
        return cast(IO[bytes], gzip.open(path))
    if magic and path.name.endswith(".gz"):
        stream.close()
        raise ConfigError(f"{path}: not gzip, though named so", expected=_FORMATS, to_do="rename or compress the file")
    stream.seek(0)
    return stream


def _read_rows(lines: _Lines) -> tuple[RowFormat, list[TraceRequest], int]:
    """The format, every request, and how many failed ones were left out."""
    texts = iter(lines)
    first = next(texts, None)
    if first is None:
        lines.refuse("an empty file", "give a file with at least one request")
    try:
        if first.startswith("{"):
            found, parse, rows = jsonl_format(set(_json_row(first))), _json_row, _chain(first, texts)
        else:
            columns = tuple(column.strip().lower() for column in _csv_fields(first))
            found, parse, rows = csv_format(columns), lambda text: _csv_row(columns, text), texts
    except ValueError as error:
        lines.refuse(str(error), "give the file as its source publishes it")
    requests, failed = _read_requests(found, parse, rows, lines)
    if not requests:
        lines.refuse("no request that was answered", "give a file with at least one")
    return found, requests, failed


def _read_requests(
    found: RowFormat, parse: Callable[[str], Row], rows: Iterator[str], lines: _Lines
) -> tuple[list[TraceRequest], int]:
    requests: list[TraceRequest] = []
    times_s: list[float] = []
    failed = 0
    for text in rows:
        try:
            raw = found.read(parse(text))
            if raw.failed and not found.strict:
                failed += 1
                continue
            requests.append(raw.request(raw.time_s if found.absolute else 0.0))
        except ValueError as error:
            lines.refuse(str(error))
        if found.absolute:
            times_s.append(raw.time_s)
        if len(requests) > REQUESTS_MAX:
            lines.refuse(f"more than {REQUESTS_MAX} requests", "cut the file, for example with head -n 1000000")
    if found.absolute and requests:
        begin_s = min(times_s)
        requests = [replace(one, arrival_s=at_s - begin_s) for one, at_s in zip(requests, times_s, strict=True)]
    return requests, failed


def _chain(first: str, texts: Iterator[str]) -> Iterator[str]:
    yield first
    yield from texts


def _json_row(text: str) -> Row:
    try:
        row = json.loads(text)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    except ValueError as error:
        raise ValueError(f"no JSON object: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{text[:40]!r}, not a JSON object")
    if missing := missing_keys(row):
        raise ValueError(f"no {' and no '.join(missing)}")
    return row


def _csv_fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from None


def _csv_row(columns: tuple[str, ...], text: str) -> Row:
    fields = _csv_fields(text)
    if len(fields) != len(columns):
        raise ValueError(f"{len(fields)} fields under {len(columns)} columns")
    return dict(zip(columns, fields, strict=True))
