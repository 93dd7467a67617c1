"""Lines in the engine's own log: one for each request that it ended, by which a trajectory is followed into the engine.

Invariants
- The line is JSON as in the logs of all our processes, and written by one call, so it stays whole among vLLM's own.
- A log that cannot be written costs the line and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import UTC, datetime

from rose_executor.token_page import RequestCount

_STDOUT = 1


def ended_line(
    request_id: str, count: RequestCount, *, arrived_s: float, ended_s: float, set_back: int, why: str
) -> str:
    """`arrived_s` and `ended_s` are `time.time()`; `set_back` counts how often its memory was taken from it."""
    return json.dumps(
        {
            "part": "engine",
            "request_id": request_id,
            "tokens": count.tokens,
            "first_version": count.first_version,
            "last_version": count.last_version,
            "seconds": round(ended_s - arrived_s, 3),
            "set_back": set_back,
            "why": why,
            "event": "request ended",
            "level": "info",
            "timestamp": _stamp(ended_s),
        },
        ensure_ascii=False,
    )


def log_ended(request_id: str, count: RequestCount, *, arrived_s: float, set_back: int, why: str) -> None:
    """Write it to standard output, past vLLM's own wrapper, which would put words before it."""
    _write(ended_line(request_id, count, arrived_s=arrived_s, ended_s=time.time(), set_back=set_back, why=why))


def log_fact(event: str, **facts: str) -> None:
    """Write one about the engine itself."""
    _write(json.dumps({"part": "engine", **facts, "event": event, "level": "info", "timestamp": _stamp(time.time())}))


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def _write(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDOUT, f"{line}\n".encode(errors="backslashreplace"))
