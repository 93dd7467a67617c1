"""The file of a replay: a head line, one line for each request as it ends, a last line. JSON, one object a line.

Invariants
- The replay never waits for the disk: lines go through a bounded buffer to a thread. What does not fit, or cannot be
  written, is counted as lost and the replay goes on.
- Whatever kills the process, every line that was written before stands, and at most the last is torn.
- A reader takes whole lines only, skips and counts what is no record, and may read while the replay writes.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.errors import ClusterError, ConfigError
from rose.workload.load_record import LoadRecord, from_values, to_line

BUFFER_LINES = 4096
_CLOSE_TIMEOUT_S = 10.0


class RecordWriter:
    """Writes one replay's file, which must not exist yet."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        """Raises ConfigError if the file exists, ClusterError if it cannot be made."""
        self._path = path
        self._fd = _new_file(path)
        self._lines: queue.Queue[bytes | None] = queue.Queue(BUFFER_LINES)
        self._unfit = 0
        self._unwritten = 0
        self._torn = False
        self.failure: OSError | None = None
        self._thread = threading.Thread(target=self._write_lines, name="records", daemon=True)
        self._thread.start()
        self._put(_line("head", head))

    @property
    def lost(self) -> int:
        """Lines that are not in the file; `failure` is the last error of the disk."""
        return self._unfit + self._unwritten

    def add(self, record: LoadRecord) -> None:
        """Never waits."""
        self._put(to_line(record))

    def close(self, end: Mapping[str, Any]) -> None:
        """Write what is left and the last line. Raises ClusterError if the disk does not take it in time."""
        try:
            self._lines.put(_line("end", end), timeout=_CLOSE_TIMEOUT_S)
            self._lines.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            self._unfit += 1
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise ClusterError(
                f"{self._path}: the disk took no line for {_CLOSE_TIMEOUT_S:g} s", to_do="look at the disk"
            )
        os.close(self._fd)

    def _put(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._unfit += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(b"\n" + line if self._torn else line)
                self._torn = False
            except OSError as error:
                self._unwritten += 1
                self.failure = error

    def _write(self, line: bytes) -> None:
        while line:
            written = os.write(self._fd, line)
            line = line[written:]
            # Until the rest is there; if it never is, the next line begins on a fresh one.
            self._torn = True


def _new_file(path: Path) -> int:
    if path.exists():
        raise ConfigError(f"{path} exists", expected="a new file", to_do="remove it or name another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    except OSError as error:
        raise ClusterError(f"{path} cannot be made: {error.strerror}", to_do="choose another place") from error


def _line(kind: str, values: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"


@dataclass(slots=True)
class Replay:
    """What a file holds so far. `end` is None while the replay runs, or if it was killed."""

    head: dict[str, Any] = field(default_factory=dict)
    records: list[LoadRecord] = field(default_factory=list)
    end: dict[str, Any] | None = None
    unreadable: int = 0


class RecordReader:
    """Follows a replay's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.replay = Replay()

    def read(self) -> list[LoadRecord]:
        """Add what is new to `replay`, and return its new records; a line still being written is left for later.

        Raises ConfigError if the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}", expected="the file of a replay") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        known = len(self.replay.records)
        for line in whole.splitlines():
            self._take(line)
        return self.replay.records[known:]

    def _take(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            kind = values.get("kind")
            if kind == "head":
                self.replay.head = values
            elif kind == "end":
                self.replay.end = values
            else:
                self.replay.records.append(from_values(values))
        except (ValueError, AttributeError, RecursionError):
            self.replay.unreadable += 1


def read_replay(path: Path) -> Replay:
    """Raises ConfigError if the file cannot be read."""
    reader = RecordReader(path)
    reader.read()
    return reader.replay
