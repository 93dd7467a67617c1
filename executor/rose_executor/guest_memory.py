"""What a guest really holds of the host's memory: asked of the kernel, never of the guest.

It is told as *resident* (pages that are there) and as *own* (each page divided by how many share it: processes that
were forked from one another share most of what they imported). Only the second one may be added up, and only it says
what would be free if the guest were gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rose.errors import ClusterError
from rose.processes import family


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Of a process with all its descendants. `own_bytes` is None where the kernel does not tell who shares a page."""

    processes: int
    resident_bytes: int
    own_bytes: int | None


def host_memory(pid: int) -> HostMemory:
    """Of a process and all its descendants, those that end meanwhile left out. Raises ClusterError if it is gone."""
    members = family(pid)
    if not members:
        raise ClusterError(f"process {pid} is gone, its memory cannot be measured")
    return _added(told for one in members if (told := _one(one.pid)) is not None)


def _added(parts: Iterable[HostMemory]) -> HostMemory:
    processes, resident_bytes, own_bytes = 0, 0, 0
    known = True
    for part in parts:
        processes += 1
        resident_bytes += part.resident_bytes
        known = known and part.own_bytes is not None
        own_bytes += part.own_bytes or 0
    return HostMemory(processes, resident_bytes, own_bytes if known else None)


def _one(pid: int) -> HostMemory | None:
    """None if it has ended."""
    try:
        told = _rollup(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))
        return HostMemory(1, told["Rss"], told["Pss"])
    except (OSError, KeyError):
        # The process has ended; or the file is missing, as on old kernels, or may not be read.
        with contextlib.suppress(psutil.Error):
            return HostMemory(1, psutil.Process(pid).memory_info().rss, None)
    return None


def _rollup(text: str) -> dict[str, int]:
    """The sums of smaps_rollup, in bytes."""
    sums = {}
    for line in text.splitlines():
        name, _, figure = line.partition(":")
        if figure.endswith(" kB"):
            sums[name] = int(figure.removesuffix(" kB")) * 1024
    return sums
