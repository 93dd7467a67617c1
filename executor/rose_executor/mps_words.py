"""What NVIDIA's MPS control daemon is told and answers, in both of its languages. Pure.

v2 is a shell: one command a line on standard input, such as `ps`. v3 takes arguments: `client list --all`. Sources:
docs.nvidia.com/deploy/mps, "Legacy MPS v2 Interface", "MPS v3 Interface", "Appendix: Environment Variables".

What it says of a limit
- v2: a percentage or memory limit of a server binds its later clients; `CUDA_MPS_*` of a client, read when it starts,
  can only be tighter. So a guest's limits go into its own environment, and the server's stay as they are: they would
  bind the serving engine at its next start.
- v3: a guest gets a namespace of its own, whose percentage takes the place of the client's.
- Nothing here changes a client that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rose.errors import ClusterError
from rose_executor.partition_terms import GuestLimits

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
BELOW_NORMAL = "1"
_MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True)
class MpsClient:
    """A process that computes through a server: of v2 the server's pid, of v3 its name."""

    pid: int
    server: str


@dataclass(frozen=True, slots=True)
class MpsServer:
    """`uid` is None where nobody says; `status` in the daemon's own word, "" where it gives none."""

    name: str
    uid: int | None
    status: str


def percentage(limits: GuestLimits) -> int | None:
    """The ceiling in whole percents of the GPU's threads, rounded down, at least 1; None for none."""
    return None if limits.share is None else max(1, math.floor(limits.share * 100))


def memory_mib(limits: GuestLimits) -> int | None:
    """The limit per GPU in MiB, None for none."""
    return None if limits.memory_gib is None else int(limits.memory_gib * _MIB_PER_GIB)


def client_env(limits: GuestLimits, directory: str, gpus: int) -> dict[str, str | None]:
    """What a v2 client is started with; the memory limit counts for each of so many GPUs that it sees."""
    percent, mib = percentage(limits), memory_mib(limits)
    return {
        PIPE_DIRECTORY: directory,
        PRIORITY: BELOW_NORMAL,
        PERCENTAGE: None if percent is None else str(percent),
        MEMORY_LIMIT: None if mib is None else ",".join(f"{gpu}={mib}M" for gpu in range(gpus)),
    }


def namespace_env(directory: str) -> dict[str, str | None]:
    """What a v3 client is started with: its namespace has all the limits, and nothing that it inherits counts."""
    return {PIPE_DIRECTORY: directory, PRIORITY: None, PERCENTAGE: None, MEMORY_LIMIT: None}


def namespace_flags(limits: GuestLimits) -> list[str]:
    """What `namespace set` makes a guest's namespace of."""
    percent, mib = percentage(limits), memory_mib(limits)
    flags = [f"--client-priority={BELOW_NORMAL}"]
    if percent is not None:
        flags.append(f"--active-thread-percentage={percent}")
    if mib is not None:
        flags.append(f"--pinned-memory-limit={mib}M")
    return flags


def pids(text: str) -> list[int]:
    """One number a line, as `get_server_list` answers. Raises ClusterError for anything else."""
    words = text.split()
    if not all(word.isdecimal() for word in words):
        raise not_understood(text)
    return [int(word) for word in words]


def clients_of_ps(text: str) -> list[MpsClient]:
    """v2's `ps`: PID ID SERVER DEVICE NAMESPACE COMMAND, one row for each of a client's devices."""
    head, *rows = [line.split(maxsplit=5) for line in text.splitlines() if line.strip()] or [["PID"]]
    if head[0] != "PID" or not all(len(row) >= 5 and row[0].isdecimal() for row in rows):
        raise not_understood(text)
    return list(dict.fromkeys(MpsClient(int(row[0]), row[2]) for row in rows))


def clients_of_list(text: str) -> list[MpsClient]:
    """v3's `client list --format=csv,noheader`: pid, server, device, namespace, command."""
    rows = list(_csv(text, 4))
    if not all(row[0].isdecimal() for row in rows):
        raise not_understood(text)
    return list(dict.fromkeys(MpsClient(int(row[0]), row[1]) for row in rows))


def servers_of_list(text: str) -> list[MpsServer]:
    """v3's `server list --format=csv,noheader`: name, uid, pid, status, and more."""
    return [MpsServer(row[0], int(row[1]) if row[1].isdecimal() else None, row[3]) for row in _csv(text, 4)]


def names_of_list(text: str) -> list[str]:
    """The first column of any v3 list."""
    return [row[0] for row in _csv(text, 1)]


def ceiling(text: str) -> float:
    """v2's answer to `get_active_thread_percentage`. Raises ClusterError if it is no number."""
    try:
        return float(text.strip())
    except ValueError:
        raise not_understood(text) from None


def not_understood(text: str) -> ClusterError:
    return ClusterError(
        f"the MPS control daemon answers {text.strip()[:200]!r}",
        expected="an answer of NVIDIA's documented MPS v2 or v3 interface",
        to_do="see control.log in CUDA_MPS_LOG_DIRECTORY",
    )


def _csv(text: str, columns_min: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.strip():
            row = [cell.strip() for cell in line.split(",")]
            if len(row) < columns_min:
                raise not_understood(text)
            yield row
