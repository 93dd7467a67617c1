"""Partitioning by a control group for the guest, in cgroup v1 or v2.

Invariants
- Groups of ours are called `rose-guest-*`, lie below this process's own, and are locked by their maker for as long as
  it lives. No other group is touched.
- A group whose maker is gone is removed by the next start, and what is still in it was a guest: it is killed, never
  set free.
- The group is of the idle class where the kernel has that, else of the smallest weight: both let the guest have all
  that nobody else wants, and neither keeps a core idle.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rose.cgroup import OwnGroups
from rose.errors import ClusterError
from rose_executor.partition_terms import Partition, Role
from rose_executor.partition_threads import checked_cores, place_threads

_PREFIX = "rose-guest-"
_EMPTY_TIMEOUT_S = 5.0
_ENDING_S = 1.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Groups:
    """Where a guest's group may be made, and what the files in it are called.

    `weights` are tried in order: file, content, what it is called. `freezer` is the folder of the group's freezer, None
    where there is none; `frozen` and `thawed` are written into its `freeze_file`.
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


def v1_groups(own: OwnGroups) -> Groups | None:
    """cgroup v1, where its processor controller is mounted."""
    if "cpu" not in own.v1:
        return None
    weights = (("cpu.idle", "1"), ("cpu.shares", "2"))
    return Groups("v1", own.v1["cpu"], own.v1.get("freezer"), weights, "freezer.state", "FROZEN", "THAWED")


def v2_groups(own: OwnGroups) -> Groups | None:
    """cgroup v2, where it has the processor controller."""
    if own.v2 is None or "cpu" not in _read(own.v2 / "cgroup.controllers").split():
        return None
    return Groups("v2", own.v2, own.v2, (("cpu.idle", "1"), ("cpu.weight", "1")), "cgroup.freeze", "1", "0")


class GroupPartitioner:
    """A guest's group in `groups`. Raises ClusterError if it cannot be made, with nothing of it left.

    `left` are the folders that `close` could not remove, because a guest still runs in them.
    """

    def __init__(self, groups: Groups, cores: Collection[int]) -> None:
        self._cores = checked_cores(cores)
        self._groups = groups
        sweep(groups)
        self._name = f"{_PREFIX}{secrets.token_hex(4)}"
        self._locks: list[int] = []
        self._weight = ""
        self.left: tuple[Path, ...] = ()
        try:
            self._make()
        except OSError as error:
            self.close()
            raise ClusterError(f"no group can be made in {groups.cpu} (cgroup {groups.version}): {error}") from error

    def place(self, pid: int, role: Role) -> None:
        place_threads(pid, lambda thread: self._place_thread(thread, role))

    def freeze(self) -> None:
        self._write_freezer(self._groups.frozen)

    def thaw(self) -> None:
        self._write_freezer(self._groups.thawed)

    def describe(self) -> Partition:
        binds = f"the guest runs only where no other process below {self._groups.cpu} wants the core"
        if self._weight != "cpu.idle":
            binds = f"the guest has the smallest weight below {self._groups.cpu}"
        freezer = "" if self._groups.freezer is not None else "; no freezer, so no emergency brake"
        return Partition(
            name=f"cgroup {self._groups.version} ({self._weight})",
            binds=binds,
            costs=f"nothing while serving sleeps, and the cores' caches are shared{freezer}",
            interference=0.1 if self._weight == "cpu.idle" else 0.2,
        )

    def close(self) -> None:
        deadline_s = time.monotonic() + _ENDING_S
        while (
            left := [folder for folder in self._folders() if not _removed(folder)]
        ) and time.monotonic() < deadline_s:
            # A process that was just killed is still in its group for a moment.
            time.sleep(_POLL_S)
        self.left = tuple(left)
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _make(self) -> None:
        if self._groups.version == "v2" and "cpu" not in _read(self._groups.cpu / "cgroup.subtree_control").split():
            # Refused where this very group has processes, unless it is the root.
            _write(self._groups.cpu / "cgroup.subtree_control", "+cpu")
        for folder in self._folders():
            _make_group(folder)
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            self._locks.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name, content in self._groups.weights:
            with contextlib.suppress(FileNotFoundError):
                _write(self._groups.cpu / self._name / name, content)
                self._weight = name
                return
        raise FileNotFoundError(f"{self._groups.cpu / self._name} has no {self._groups.weights[-1][0]}")

    def _place_thread(self, thread: int, role: Role) -> None:
        if self._cores:
            os.sched_setaffinity(thread, self._cores)
        if role is Role.GUEST:
            for folder in self._folders():
                # The kernel moves the whole process that a thread belongs to.
                _write(folder / "cgroup.procs", str(thread))

    def _folders(self) -> tuple[Path, ...]:
        return tuple(parent / self._name for parent in self._groups.parents)

    def _write_freezer(self, content: str) -> None:
        if self._groups.freezer is None:
            raise ClusterError("cgroup v1 has no freezer here", to_do="end the guest instead")
        try:
            _write(self._groups.freezer / self._name / self._groups.freeze_file, content)
        except OSError as error:
            raise ClusterError(f"the guest's group cannot be made {content}: {error}") from error


def sweep(groups: Groups) -> list[str]:
    """Remove the groups whose makers are gone, and kill what is left in them; their names.

    Raises ClusterError if one does not become empty.
    """
    names = sorted({folder.name for parent in groups.parents for folder in parent.glob(f"{_PREFIX}*")})
    return [name for name in names if _sweep_one(groups, name)]


def _sweep_one(groups: Groups, name: str) -> bool:
    """Whether the group was an orphan, which is gone now."""
    locks: list[int] = []
    try:
        for parent in groups.parents:
            with contextlib.suppress(FileNotFoundError):
                locks.append(os.open(parent / name, os.O_RDONLY | os.O_CLOEXEC))
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        _end_processes(groups, name)
        for parent in groups.parents:
            with contextlib.suppress(FileNotFoundError):
                _remove_group(parent / name)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ClusterError(f"the orphaned group {name} cannot be removed: {error}") from error
    finally:
        for lock in locks:
            os.close(lock)
    return True


def _end_processes(groups: Groups, name: str) -> None:
    deadline_s = time.monotonic() + _EMPTY_TIMEOUT_S
    while pids := {int(pid) for parent in groups.parents for pid in _read(parent / name / "cgroup.procs").split()}:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if groups.freezer is not None:
            # What is frozen in v1 does not even die.
            _write(groups.freezer / name / groups.freeze_file, groups.thawed)
        if time.monotonic() >= deadline_s:
            raise ClusterError(f"processes {sorted(pids)} of an executor that is gone survive SIGKILL")
        time.sleep(_POLL_S)


def _make_group(folder: Path) -> None:
    folder.mkdir()


def _remove_group(folder: Path) -> None:
    folder.rmdir()


def _removed(folder: Path) -> bool:
    try:
        _remove_group(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, content: str) -> None:
    """Into a file that the kernel has made: never makes one."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
