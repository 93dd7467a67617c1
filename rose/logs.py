"""Structured logs: JSON lines in a file for machines, short lines on stderr for people.

- A program that has not called `open_log` has the same short lines by `logging`, from the logger `rose`.
- Whatever goes wrong while writing a line, the run goes on: lost lines are counted, the first is told on stderr.
- Ids bound with `bound(...)` (trajectory_id, group_id, engine_id, version) are on every line logged inside, across
  await, from our code and from libraries alike.
- Values whose key names a secret never reach either place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from rose.errors import ClusterError

REDACTED = "[redacted]"
DEPTH_MAX = 8
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_SECRET_WORDS = {"authorization", "cookie", "credential", "credentials", "passwd", "password", "secret", "secrets"}
_SECRET_ENDS = ("token", "apikey", "api key", "private key", "access key", "secret key")


def logger(part: str) -> structlog.stdlib.BoundLogger:
    """Logger of one part of ROSE: `logger("engine").warning("restarted", engine_id="engine-0")`."""
    wrapped = structlog.wrap_logger(
        logging.getLogger("rose"), processors=_OURS, wrapper_class=structlog.stdlib.BoundLogger
    )
    return cast(structlog.stdlib.BoundLogger, wrapped.bind(part=part))


def bound(**ids: str | int) -> AbstractContextManager[None]:
    """Put ids on every line that is logged inside the `with` body, in this task and those it starts."""
    return structlog.contextvars.bound_contextvars(**ids)


class RunLog:
    """The log of this process: opened once, closed at the end. Made by `open_log`."""

    def __init__(self, file: _FileHandler, terminal: _TerminalHandler) -> None:
        self._file = file
        self._terminal = terminal

    @property
    def lost_lines(self) -> int:
        """Lines that reached the file not at all or in part."""
        return self._file.lost_lines

    def close(self) -> None:
        """Stop logging to both places. Safe to call twice."""
        root = logging.getLogger()
        for handler in (self._file, self._terminal):
            root.removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_log(path: Path) -> RunLog:
    """Send this process's logs, those of the standard library included, to the file `path` and to stderr.

    Lines are appended: from INFO on to the file, from WARNING on to stderr, whose rest belongs to the run's view.
    Raises ClusterError if the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ClusterError(
            f"{path}: {error.strerror}", expected="a log file that can be written", to_do="check the output folder"
        ) from error
    file = _FileHandler(fd)
    terminal = _TerminalHandler()
    for handler, render, level in ((file, _json_line, logging.INFO), (terminal, _short_line, logging.WARNING)):
        handler.setLevel(level)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[structlog.stdlib.add_logger_name, *_SHARED],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
            )
        )
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    logging.captureWarnings(True)
    return RunLog(file, terminal)


def redact(value: object, depth: int = 0) -> object:
    """A copy of nested dicts, lists and tuples, with every value under a secret's key replaced.

    What lies deeper than `DEPTH_MAX` is left out, since a structure may hold itself.
    """
    if depth > DEPTH_MAX:
        return "[too deep]"
    if isinstance(value, dict):
        return {
            key: REDACTED if isinstance(key, str) and is_secret(key) else redact(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, depth + 1) for item in value]
    return value


@lru_cache(maxsize=4096)  # The same few keys stand on every line, and this was most of what a line cost.
def is_secret(key: str) -> bool:
    """Whether a key names a secret. `lease_token` and `apiKey` do; `output_tokens` and `token_ids` do not."""
    words = [word.lower() for word in _WORD.findall(key)]
    return not _SECRET_WORDS.isdisjoint(words) or " ".join(words).endswith(_SECRET_ENDS)


def _redact_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return cast(EventDict, redact(event))


class _Event(dict[str, Any]):
    """What was logged. Its text is one line, for programs that have not called `open_log`, the time and level apart."""

    def __str__(self) -> str:
        return _line(self)


def _as_record(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[EventDict], dict[str, Any]]:
    (_,), named = structlog.stdlib.ProcessorFormatter.wrap_for_formatter(logger, method, event)
    return (_Event(event),), named


_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    _redact_event,
]
_OURS: list[Processor] = [
    structlog.stdlib.filter_by_level,
    *_SHARED,
    _as_record,
]


def _json_line(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return json.dumps(event, default=str, ensure_ascii=False)


def _short_line(_logger: WrappedLogger, _method: str, event: Mapping[str, Any]) -> str:
    """`12:03:05 warning engine: restarted engine_id=engine-0`, and a traceback below if there is one."""
    return f"{str(event.get('timestamp', ''))[11:19]} {event.get('level', '')} {_line(event)}"


def _line(event: Mapping[str, Any]) -> str:
    """The same without time and level."""
    rest = {key: value for key, value in event.items() if key not in ("timestamp", "level")}
    text = rest.pop("event", "")
    part = rest.pop("part", None) or rest.pop("logger", "")
    trace = rest.pop("exception", "")
    line = " ".join([f"{part}: {text}", *(f"{key}={_shown(value)}" for key, value in rest.items())])
    return f"{line}\n{trace}" if trace else line


def _shown(value: object) -> str:
    """As text of one line: names of files, say, come from anybody."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))


class _FileHandler(logging.Handler):
    """One write per line, so that lines of several threads or processes never mix."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd: int | None = fd
        self._torn = False
        self.lost_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception as error:  # noqa: BLE001 - a value's own __str__ may raise anything
            return self._lost(f"a line cannot be formatted: {error!r}")
        if self._fd is None:
            return None
        try:
            if self._torn:
                line = b"\n" + line
            self._torn = os.write(self._fd, line) != len(line)
        except OSError as error:
            return self._lost(error.strerror or str(error))
        return self._lost("the disk took half a line") if self._torn else None

    def _lost(self, why: str) -> None:
        self.lost_lines += 1
        if self.lost_lines == 1:
            _TerminalHandler.say(f"log lines are being lost ({why}); the run goes on")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        super().close()


class _TerminalHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at that moment, since a live view replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a value's own __str__ may raise anything
            line = f"a log line cannot be formatted: {error!r}"
        self.say(line)

    @staticmethod
    def say(line: str) -> None:
        try:
            sys.stderr.write(f"{line}\n")
        except (OSError, ValueError):
            return  # the terminal is gone; the file has the line
