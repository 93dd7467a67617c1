"""What tests ask about processes that they have started."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

DEADLINE_S = 120.0


def until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
