"""Control groups for guests, in cgroup v1 or v2: where they may be made, what is written into them, how orphans end.

Invariants
- Groups of ours are called `rose-guest-*`, lie below this process's own, and are locked by their maker for as long as
  it lives. No other group is touched. One that is not locked yet may be swept; its maker notices (`claim_group`).
- A group whose maker is gone is removed by the next start, or by the maker's watchdog, and what is still in it was a
  guest: it is killed, never set free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.cgroup import OwnGroups
from rose.errors import ClusterError

PREFIX = "rose-guest-"
PERIOD_US = 10_000
"""A share is kept within each such period: shorter than most steps, so a guest's turns are as short."""
_QUOTA_US_MIN = 1000
_PERIOD_US_MAX = 1_000_000
_EMPTY_TIMEOUT_S = 5.0
_POLL_S = 0.01

Release = Callable[[Collection[int]], None]
"""Called with the processes that are about to be killed; raises nothing."""


def nothing_to_release(pids: Collection[int]) -> None:
    """On a device that takes no harm from a process that is killed."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Where a guest's group may be made, and what the files in it are called.

    `weights` are tried in order: file, content. `freezer` is the folder of the group's freezer, None where there is
    none; `frozen` and `thawed` are written into its `freeze_file`.
    """

    version: str
    cpu: Path
    freezer: Path | None
    weights: tuple[tuple[str, str], ...]
    freeze_file: str
    frozen: str
    thawed: str

    @property
    def parents(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(folder for folder in (self.cpu, self.freezer) if folder is not None))

    def quota(self, cores: float | None) -> tuple[tuple[str, str], ...]:
        """File and content, in the order of writing, that hold a group to so many cores; None takes the limit away.

        Raises ClusterError for less than a thousandth of a core, which no kernel keeps.
        """
        period_us = PERIOD_US
        if cores is not None:
            period_us = max(PERIOD_US, int(_QUOTA_US_MIN / cores)) if cores > 0 else _PERIOD_US_MAX + 1
            if period_us > _PERIOD_US_MAX:
                raise ClusterError(
                    f"no kernel holds a group to {cores:g} cores", expected="a thousandth of a core or more"
                )
        if self.version == "v2":
            return (("cpu.max", f"{'max' if cores is None else int(cores * period_us)} {period_us}"),)
        unlimited = (("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", str(period_us)))
        # Either file alone may ask for more than a parent has, so the limit is lifted while the period changes.
        return unlimited if cores is None else (*unlimited, ("cpu.cfs_quota_us", str(int(cores * period_us))))

    def as_words(self) -> dict[str, Any]:
        """What `groups_of` makes the same of, in another process."""
        return {
            "version": self.version,
            "cpu": str(self.cpu),
            "freezer": None if self.freezer is None else str(self.freezer),
        }


def v1_groups(own: OwnGroups) -> Groups | None:
    """cgroup v1, where its processor controller is mounted."""
    return None if "cpu" not in own.v1 else _v1(own.v1["cpu"], own.v1.get("freezer"))


def v2_groups(own: OwnGroups) -> Groups | None:
    """cgroup v2, where it has the processor controller."""
    if own.v2 is None or "cpu" not in read(own.v2 / "cgroup.controllers").split():
        return None
    return _v2(own.v2)


def groups_of(words: Mapping[str, Any]) -> Groups:
    """The groups that `as_words` told of."""
    if words["version"] == "v2":
        return _v2(Path(words["cpu"]))
    return _v1(Path(words["cpu"]), None if words["freezer"] is None else Path(words["freezer"]))


def _v1(cpu: Path, freezer: Path | None) -> Groups:
    weights = (("cpu.idle", "1"), ("cpu.shares", "2"))
    return Groups("v1", cpu, freezer, weights, "freezer.state", "FROZEN", "THAWED")


def _v2(folder: Path) -> Groups:
    return Groups("v2", folder, folder, (("cpu.idle", "1"), ("cpu.weight", "1")), "cgroup.freeze", "1", "0")


def sweep(groups: Groups, release: Release = nothing_to_release) -> list[str]:
    """Remove the groups whose makers are gone, and kill what is left in them; their names.

    Raises ClusterError if one does not become empty.
    """
    names = sorted({folder.name for parent in groups.parents for folder in parent.glob(f"{PREFIX}*")})
    return [name for name in names if _sweep_one(groups, name, release)]


def _sweep_one(groups: Groups, name: str, release: Release) -> bool:
    """Whether the group was an orphan, which is gone now."""
    locks: list[int] = []
    try:
        for parent in groups.parents:
            with contextlib.suppress(FileNotFoundError):
                locks.append(os.open(parent / name, os.O_RDONLY | os.O_CLOEXEC))
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        _end_processes(groups, name, release)
        for parent in groups.parents:
            with contextlib.suppress(FileNotFoundError):
                remove_group(parent / name)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ClusterError(f"the orphaned group {name} cannot be removed: {error}") from error
    finally:
        for lock in locks:
            os.close(lock)
    return True


def _end_processes(groups: Groups, name: str, release: Release) -> None:
    deadline_s = time.monotonic() + _EMPTY_TIMEOUT_S
    released: set[int] = set()
    while pids := {int(pid) for parent in groups.parents for pid in read(parent / name / "cgroup.procs").split()}:
        if pids - released:
            release(pids - released)
            released |= pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if groups.freezer is not None:
            # What is frozen in v1 does not even die.
            write(groups.freezer / name / groups.freeze_file, groups.thawed)
        if time.monotonic() >= deadline_s:
            raise ClusterError(f"processes {sorted(pids)} of an executor that is gone survive SIGKILL")
        time.sleep(_POLL_S)


def claim_group(folder: Path) -> int | None:
    """Make a group and lock it; the lock, None if somebody else's sweep took it for an orphan before it was locked.

    Raises OSError.
    """
    make_group(folder)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A folder that was removed can be locked all the same.
        claimed = folder.exists()
    except BlockingIOError:
        claimed = False
    except BaseException:
        os.close(lock)
        raise
    if not claimed:
        os.close(lock)
        return None
    return lock


def make_group(folder: Path) -> None:
    folder.mkdir()


def remove_group(folder: Path) -> None:
    folder.rmdir()


def write(path: Path, content: str) -> None:
    """Into a file that the kernel has made: never makes one."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)


def read(path: Path) -> str:
    """The text of a kernel's file, "" if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
