"""What a guest really holds: asked of the kernel and of the device's driver, never of the guest.

Memory of the host is told as *resident* (pages that are there) and as *own* (each page divided by how many share it:
processes that were forked from one another share most of what they imported). Only the second one may be added up, and
only it says what would be free if the guest were gone.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rose.errors import ClusterError
from rose.processes import family

_SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_SMI_S = 10.0


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


def device_memory(pids: Collection[int]) -> int | None:
    """Bytes that these processes hold on all NVIDIA devices; None where no driver is asked.

    Raises ClusterError if the driver does not answer. It may block: not for an event loop.
    """
    try:
        answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{_SMI[0]} does not answer: {error}") from error
    if answer.returncode:
        raise ClusterError(
            f"{_SMI[0]} ended with {answer.returncode}: {(answer.stderr or answer.stdout).strip()}",
            expected="a driver that runs",
        )
    return held_by(answer.stdout, pids)


def held_by(listing: str, pids: Collection[int]) -> int:
    """Bytes that these processes hold, from lines of `pid, MiB` as nvidia-smi lists them.

    Raises ClusterError for a line that says something else, "[N/A]" for a process of ours among them.
    """
    held = 0
    for line in filter(None, map(str.strip, listing.splitlines())):
        pid, _, mib = (part.strip() for part in line.partition(","))
        if not pid.isdecimal():
            raise ClusterError(f"{_SMI[0]} lists {line!r}", expected="process and MiB")
        if int(pid) not in pids:
            continue
        if not mib.isdecimal():
            raise ClusterError(
                f"{_SMI[0]} does not tell what process {pid} holds: {mib!r}", expected="MiB, from the host's driver"
            )
        held += int(mib) * 2**20
    return held


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
