"""Which processes of a guest somebody keeps from running, or what started it: by SIGSTOP, from a terminal, a debugger.

The kernel is asked: a process that is stopped says nothing on the board, and so does a guest without work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import psutil

from rose.processes import family

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def stopped_processes(pid: int) -> tuple[int, ...]:
    """Of a process, its descendants and its parent, those that stand still.

    One of the first is enough to keep an engine from answering. Its parent tells of its end, and passes signals on.
    """
    found = []
    members = family(pid)
    for member in (*members, *_parents(members[:1])):
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.status() in _STOPPED:
                found.append(member.pid)
    return tuple(found)


def _parents(processes: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(process.ppid())
