"""Partitioning by a control group for the guest, in cgroup v1 or v2.

Invariants
- The group is of the idle class where the kernel has that, else of the smallest weight: both let the guest have all
  that nobody else wants, and neither keeps a core idle. Only a share does that, and there is none unless it is asked
  for.
- It is locked while this process lives, and a watchdog ends what is in it as soon as this process is gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rose.errors import ClusterError
from rose_executor import guest_groups
from rose_executor.guest_groups import PERIOD_US, PREFIX, Groups, read, sweep, write
from rose_executor.mps_release import releasing
from rose_executor.partition_terms import Partition, Role
from rose_executor.partition_threads import checked_cores, place_threads
from rose_executor.partition_watchdog import Watchdog

_ENDING_S = 1.0
_CLAIMS_MAX = 20
_POLL_S = 0.01


class GroupPartitioner:
    """A guest's group in `groups`, held to `share` of its cores if that is given.

    `mps_directory` is of the MPS daemon that guests are clients of, None if of none. Orphans are ended first if it
    `sweeps`. `left` are the folders that `close` could not remove, because a guest still runs in them. Raises
    ClusterError if the group cannot be made, with nothing of it left.
    """

    def __init__(
        self,
        groups: Groups,
        cores: Collection[int],
        share: float | None = None,
        mps_directory: Path | None = None,
        *,
        sweeps: bool = True,
    ) -> None:
        self._cores = checked_cores(cores)
        self._groups = groups
        if sweeps:
            sweep(groups, releasing(mps_directory))
        self._name = _new_name()
        self._locks: list[int] = []
        self._weight = ""
        self._share: float | None = None
        self._watchdog = Watchdog(groups, mps_directory)
        self.left: tuple[Path, ...] = ()
        try:
            self._make()
            if share is not None:
                self.set_share(share)
        except OSError as error:
            self.close()
            raise ClusterError(f"no group can be made in {groups.cpu} (cgroup {groups.version}): {error}") from error
        except BaseException:
            self.close()
            raise

    def place(self, pid: int, role: Role) -> None:
        if role is Role.GUEST:
            self._watchdog.guards(pid)
        place_threads(pid, lambda thread: self._place_thread(thread, role))

    def freeze(self) -> None:
        self._write_freezer(self._groups.frozen)

    def thaw(self) -> None:
        if self._groups.freezer is not None:  # else nothing was ever frozen
            self._write_freezer(self._groups.thawed)

    def set_share(self, share: float | None) -> None:
        cores = None if share is None else share * self._core_count()
        try:
            for name, content in self._groups.quota(cores):
                write(self._groups.cpu / self._name / name, content)
        except OSError as error:
            raise ClusterError(
                f"the guest cannot be held to {'all' if cores is None else f'{cores:g}'} cores: {error}",
                expected="a kernel with group quotas, and no tighter one above the guest's",
                to_do="take partition.guest_share away, or set a smaller one",
            ) from error
        self._share = share

    def guest_env(self) -> Mapping[str, str | None]:
        return {}

    def release(self, pid: int) -> None:
        """A processor takes no harm from what is killed."""

    def renew_watchdog(self) -> bool:
        return self._watchdog.renew()

    def describe(self) -> Partition:
        binds = f"the guest runs only where no other process below {self._groups.cpu} wants the core"
        if self._weight != "cpu.idle":
            binds = f"the guest has the smallest weight below {self._groups.cpu}"
        costs = "nothing while serving sleeps, and the cores' caches are shared"
        if self._share is not None:
            binds += (
                f"; it gets at most {self._share:.0%} of {self._core_count()} cores in each {PERIOD_US // 1000} ms,"
                " and a change of that binds it at once"
            )
            costs = "the rest of the cores stays idle while serving sleeps; the cores' caches are shared"
        if self._groups.freezer is None:
            costs += "; no freezer, so no emergency brake"
        return Partition(
            name=f"cgroup {self._groups.version} ({self._weight})",
            binds=binds,
            costs=costs,
            interference=0.1 if self._weight == "cpu.idle" else 0.2,
            holds=True,
        )

    def close(self) -> None:
        deadline_s = time.monotonic() + _ENDING_S
        while (
            left := [folder for folder in self._folders() if not _removed(folder)]
        ) and time.monotonic() < deadline_s:
            # A process that was just killed is still in its group for a moment.
            time.sleep(_POLL_S)
        self.left = tuple(left)
        self._watchdog.close()
        self._unlock()

    def _make(self) -> None:
        if self._groups.version == "v2" and "cpu" not in read(self._groups.cpu / "cgroup.subtree_control").split():
            # Refused where this very group has processes, unless it is the root.
            write(self._groups.cpu / "cgroup.subtree_control", "+cpu")
        for _ in range(_CLAIMS_MAX):
            if self._claimed():
                break
            self._name = _new_name()
        else:
            raise BlockingIOError(f"executors that start here removed {_CLAIMS_MAX} new groups one after another")
        for name, content in self._groups.weights:
            with contextlib.suppress(FileNotFoundError):
                write(self._groups.cpu / self._name / name, content)
                self._weight = name
                return
        raise FileNotFoundError(f"{self._groups.cpu / self._name} has no {self._groups.weights[-1][0]}")

    def _claimed(self) -> bool:
        """Whether the group is made and ours in every hierarchy; nothing of it is left if another executor swept it."""
        for folder in self._folders():
            lock = guest_groups.claim_group(folder)
            if lock is None:
                for made in self._folders():
                    _removed(made)
                self._unlock()
                return False
            self._locks.append(lock)
        return True

    def _unlock(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _place_thread(self, thread: int, role: Role) -> None:
        if self._cores:
            os.sched_setaffinity(thread, self._cores)
        if role is Role.GUEST:
            for folder in self._folders():
                # The kernel moves the whole process that a thread belongs to.
                write(folder / "cgroup.procs", str(thread))

    def _core_count(self) -> int:
        return len(self._cores) or len(os.sched_getaffinity(0))

    def _folders(self) -> tuple[Path, ...]:
        return tuple(parent / self._name for parent in self._groups.parents)

    def _write_freezer(self, content: str) -> None:
        if self._groups.freezer is None:
            raise ClusterError("cgroup v1 has no freezer here", to_do="end the guest instead")
        try:
            write(self._groups.freezer / self._name / self._groups.freeze_file, content)
        except OSError as error:
            raise ClusterError(f"the guest's group cannot be made {content}: {error}") from error


def _new_name() -> str:
    return f"{PREFIX}{secrets.token_hex(4)}"


def _removed(folder: Path) -> bool:
    try:
        guest_groups.remove_group(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
