"""How processes leave an MPS server before they are killed.

NVIDIA, "Client Early Termination": to end a client by a signal while it has work on the GPU may leave its server, and
so every other client of it, in an undefined state; after `terminate_client` a SIGKILL is safe.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from rose.errors import ClusterError
from rose_executor.guest_groups import Release, nothing_to_release
from rose_executor.mps_daemon import MpsDaemon, asking, recognised


def release(daemon: MpsDaemon, pids: Collection[int]) -> None:
    """Terminate those of the processes that are clients. Raises ClusterError, after all others, if one was not."""
    failures = []
    for client in daemon.clients():
        if client.pid in pids:
            try:
                daemon.terminate(client)
            except ClusterError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def releasing(mps_directory: Path | None) -> Release:
    """Do the same through the daemon of a directory, and raise nothing: whoever calls this kills in any case."""
    if mps_directory is None:
        return nothing_to_release

    def release_or_say(pids: Collection[int]) -> None:
        try:
            release(recognised(mps_directory, asking(mps_directory)), pids)
        except ClusterError as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()

    return release_or_say
