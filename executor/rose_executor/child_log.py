"""What a launched process wrote, from where its log stood when it was launched: an error message's last part.

vLLM warns of a dozen harmless things at every start. They stay in the file and are no part of a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_READ_BYTES = 65_536
_TAIL_LINES = 12

_PROCESS = r"^(?:\(\w+ pid=\d+\) )?"
_NOISE = re.compile(
    _PROCESS + r"(?:(?:DEBUG|INFO|WARNING) \d\d-\d\d |INFO: )"  # vLLM, uvicorn
    r"|^W\d{4} \d\d:|^\[W\d{4} \d\d:"  # torch
    r"|^.+:\d+: \w*Warning: "  # Python's own, followed by the indented line that it is about
    r'|^\{"part": "engine", "request_id": '  # ours, of ended requests
    r"|it/s\]|\?it/s\]"  # bars of progress
)
_PYTHON_WARNING = re.compile(r"^.+:\d+: \w*Warning: ")
# Who says it, when and where: differs between two printings of the same traceback.
_LABEL = re.compile(_PROCESS + r"(?:ERROR \S+ \S+ \[[^\]]*\] ?)?")
# vLLM 0.30 does not put the process before it.
_CORE = re.compile(r"^\(EngineCore\b[^)]*\) ERROR |^ERROR \S+ \S+ \[core\.py:")
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)(?:: .*)?$")


class ChildLog:
    """Reads what is appended to `path` from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0

    def text(self) -> str:
        """Everything, harmless or not; of a long log its last 64 KiB."""
        try:
            with self.path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._start, log.tell() - _READ_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self) -> str:
        """The last lines that tell something, each once; may be empty."""
        latest: dict[str, str] = {}
        for line in _told(self.text()):
            key = _LABEL.sub("", line)
            latest.pop(key, None)
            latest[key] = line
        return "\n".join(list(latest.values())[-_TAIL_LINES:])

    def cause(self) -> str:
        """The last error of the engine core, which vLLM's own last lines only point to, else the last error."""
        return self.core_cause() or _last_raised(_told(self.text()))

    def core_cause(self) -> str:
        """The last error that the engine core itself has logged; empty if it had no time to."""
        return _last_raised(line for line in _told(self.text()) if _CORE.match(line))

    def last_words(self) -> str:
        """To be put behind what happened: the cause, then the last lines, as far as there are any."""
        cause, tail = self.cause(), self.tail()
        return (f": {cause}" if cause else "") + (f"; last lines of its log:\n{tail}" if tail else "")


def _last_raised(lines: Iterable[str]) -> str:
    raised = [text for line in lines if _RAISED.match(text := _LABEL.sub("", line))]
    return raised[-1] if raised else ""


def _told(text: str) -> list[str]:
    """The lines that are not harmless, in order."""
    told: list[str] = []
    quoted = False
    for line in text.splitlines():
        quotes_next = _PYTHON_WARNING.match(line) is not None
        if line.strip() and not _NOISE.search(line) and not (quoted and line.startswith("  ")):
            told.append(line)
        quoted = quotes_next
    return told
