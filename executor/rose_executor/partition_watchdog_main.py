"""The watchdog's process: sleeps while the executor lives, and ends its guests when it is gone.

Invariants
- It belongs to no group of the guest's and to no session of the executor's: nothing that stops or ends those, or their
  terminal, reaches it.
- The end of the executor is seen by the kernel's own handle of that process: whoever else holds its end of the pipe
  deceives nobody.
- A guest of an MPS daemon is released there before it is killed. One that is frozen is killed first, then thawed.
- It ends when it is sent away, or when nothing is left of the guests, and never before.

From the executor come JSON lines: {"guest": pid, "born": ticks}, and {"end": true}, after which nothing is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil

from rose.errors import ClusterError
from rose.processes import family
from rose_executor.guest_groups import Groups, Release, groups_of, sweep
from rose_executor.mps_release import releasing
from rose_executor.process_birth import birth_ticks

_AGAIN_S = 0.2


def main(words: str) -> None:
    """Watch the process that started this one."""
    told = json.loads(words)
    guests: dict[int, int] = {}
    if not _sent_away(told["parent"], guests):
        groups = None if told["groups"] is None else groups_of(told["groups"])
        end_guests(guests, groups, releasing(None if told["mps"] is None else Path(told["mps"])))


def _sent_away(parent: int, guests: dict[int, int]) -> bool:
    """Learn of guests until the parent sends this process away, or is gone."""
    os.set_blocking(0, False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        handle = -1
    else:
        poll.register(handle, select.POLLIN)
    buffer = b""
    while True:
        # Parent first: what it wrote last is then read for certain.
        gone = handle < 0 or os.getppid() != parent
        buffer, closed = _read(buffer)
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                return True
            guests[message["guest"]] = message["born"]
        if gone or closed:
            return False
        poll.poll()


def _read(buffer: bytes) -> tuple[bytes, bool]:
    """All that has arrived, and whether no more can."""
    while True:
        try:
            piece = os.read(0, 65_536)
        except BlockingIOError:
            return buffer, False
        if not piece:
            return buffer, True
        buffer += piece


def end_guests(guests: dict[int, int], groups: Groups | None, release: Release) -> None:
    """Until none of these processes, their descendants, and what is in orphaned groups is left."""
    released: set[int] = set()
    while True:
        living = {pid for guest, born in guests.items() for pid in _living(guest, born)}
        if living - released:
            release(living - released)
            released |= living
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if groups is not None:
                sweep(groups, release)
        except ClusterError as error:
            with contextlib.suppress(OSError):  # whoever read that may have gone with the executor
                sys.stderr.write(f"{error}\n")
        else:
            if not living:
                return
        time.sleep(_AGAIN_S)


def _living(pid: int, born: int) -> list[int]:
    """A process and its descendants, those left out that have ended and wait for their parent."""
    members = family(pid)
    try:
        # Asked last: the number may have become somebody else's meanwhile.
        if birth_ticks(pid) != born:
            return []
    except ProcessLookupError:
        return []
    return [one.pid for one in members if _lives(one)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
