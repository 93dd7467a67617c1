"""Which processes of a guest somebody keeps from running: by SIGSTOP, from a terminal, with a debugger.

The kernel is asked: a process that is stopped says nothing on the board, and so does a guest without work.
"""

from __future__ import annotations

import contextlib

import psutil

from rose.processes import family

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def stopped_processes(pid: int) -> tuple[int, ...]:
    """Of a process and its descendants, those that stand still; one is enough to keep an engine from answering."""
    found = []
    for member in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.status() in _STOPPED:
                found.append(member.pid)
    return tuple(found)
