"""The watchdog of a partitioner, from the executor's side: a process that ends the guest if this one just vanishes.

Invariants
- It is there before the first guest is placed, and is told of each of them. If it dies, another takes over all of them,
  at its owner's next look (`renew`) or with the next guest.
- Whatever ends this process, SIGKILL included, it ends the guests, also those that are frozen or that nobody guards
  (`partition_watchdog_main`), unless it has died itself since the last look. Only `close` sends it away.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from rose.errors import ClusterError
from rose_executor.guest_groups import Groups
from rose_executor.process_birth import birth_ticks

_END_TIMEOUT_S = 5.0


class Watchdog:
    """`groups` are those that it removes; through the MPS daemon in `mps_directory`, if any, it releases guests.

    No process is started before there is a guest.
    """

    def __init__(self, groups: Groups | None, mps_directory: Path | None = None) -> None:
        self._groups = groups
        self._mps_directory = mps_directory
        self._process: subprocess.Popen[bytes] | None = None
        self._guests: dict[int, int] = {}

    def guards(self, pid: int) -> None:
        """A guest has been born. Raises ClusterError if there can be no watchdog."""
        with contextlib.suppress(ProcessLookupError):
            self._forget_gone()
            self._guests[pid] = birth_ticks(pid)
            if not self._tell(pid):
                self._start()

    def renew(self) -> bool:
        """Start another if it has died and there are guests; whether that was so.

        Raises ClusterError if there can be none; the next call tries again.
        """
        if self._process is None or self._process.poll() is None:
            return False
        self._forget_gone()
        if not self._guests:
            return False
        self._start()
        return True

    def close(self) -> None:
        """Send it away: what is still there stays. It is gone afterwards."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b'{"end": true}\n')
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _forget_gone(self) -> None:
        self._guests = {known: born for known, born in self._guests.items() if psutil.pid_exists(known)}

    def _tell(self, pid: int) -> bool:
        if self._process is None or self._process.stdin is None or self._process.poll() is not None:
            return False
        try:
            self._process.stdin.write(json.dumps({"guest": pid, "born": self._guests[pid]}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _start(self) -> None:
        words = {
            "parent": os.getpid(),
            "groups": None if self._groups is None else self._groups.as_words(),
            "mps": None if self._mps_directory is None else str(self._mps_directory),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rose_executor.partition_watchdog_main", json.dumps(words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"no watchdog for the guest can be started: {error}") from error
        if not all(self._tell(pid) for pid in list(self._guests)):
            raise ClusterError("the guest's watchdog died at once", to_do="see the executor's standard error")
