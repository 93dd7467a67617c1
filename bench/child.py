"""Runs a whole command as a process of its own and times it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.registry import BenchFailed

SHOWN_LINES = 25
GRACE_S = 10.0


def timed(command: Sequence[str], *, cwd: Path, log: Path, timeout_s: float) -> float:
    """Seconds from start to end. All that the command prints goes to `log`.

    Raises BenchFailed with the last lines if it fails, or if it outlasts `timeout_s` (it and all it started are then
    ended).
    """
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchFailed(
                f"{_words(command)} did not end within {timeout_s:g} s\n{_last_lines(log)}",
                to_do="see its last lines above",
            ) from None
        finally:
            _end(child)
    took_s = time.monotonic() - began
    if status != 0:
        raise BenchFailed(
            f"{_words(command)} ended with status {status} after {took_s:.1f} s\n{_last_lines(log)}",
            to_do="see its last lines above",
        )
    return took_s


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask the command to stop as Ctrl-C would, so that it takes along what it started; then end what is left of it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if child.poll() is not None:
            break
        os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _words(command: Sequence[str]) -> str:
    return " ".join(command)


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:]) or "    (it printed nothing)"
