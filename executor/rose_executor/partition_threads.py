"""Partitioning without control groups: the kernel's idle scheduling class, thread by thread, and stop signals.

Invariants
- Every thread of a process and of its descendants is placed; later ones inherit it from the thread that starts them.
- The serving engine's scheduling is left as it is; it is pinned, and only where cores were named.
- Where the kernel groups processes by session and weighs the groups (autogroup), a class means something within a
  session only. So the guest's sessions get the smallest weight, if they are none of this process's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from rose.errors import ClusterError
from rose.processes import family, session_of
from rose_executor.partition_terms import Partition, Role
from rose_executor.partition_watchdog import Watchdog

_NICEST = 19
_PASSES_MAX = 20
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_SESSION_S = 0.2
_POLL_S = 0.002
_LOWER_ATTEMPTS = 10
_LOWER_AGAIN_S = 0.12


class ThreadPartitioner:
    """`why` says what better way is missing here; `mps_directory` is of the MPS daemon that guests are clients of."""

    def __init__(self, cores: Collection[int], why: str, mps_directory: Path | None = None) -> None:
        self._cores = checked_cores(cores)
        self._why = why
        self._guests: set[psutil.Process] = set()
        self._watchdog = Watchdog(None, mps_directory)

    def place(self, pid: int, role: Role) -> None:
        if role is Role.GUEST:
            self._watchdog.guards(pid)
        place_threads(pid, lambda thread: self._place_thread(thread, role))
        if role is Role.GUEST:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._guests.add(psutil.Process(pid))
            lower_sessions(pid)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def set_share(self, share: float | None) -> None:
        if share is not None:
            raise ClusterError(
                f"a guest cannot be held to a share of the cores here: {self._why}",
                expected="control groups that this process may write",
                to_do="take partition.guest_share away, or mend that"
                + ("" if os.geteuid() == 0 else ": run as root, or have a group delegated to you"),
            )

    def guest_env(self) -> Mapping[str, str | None]:
        return {}

    def release(self, pid: int) -> None:
        """A processor takes no harm from what is killed."""

    def renew_watchdog(self) -> bool:
        return self._watchdog.renew()

    def describe(self) -> Partition:
        return Partition(
            name="none (idle scheduling class)",
            binds="the guest's threads run only where no other thread of its control group wants the core"
            + ("; of another session: the guest's has the smallest weight" if _weighs_sessions() else ""),
            costs=f"no control groups ({self._why}): a guest that changes its own class escapes, "
            "and one that forks while it is frozen is stopped only at the second look",
            interference=0.2,
            holds=False,
        )

    def close(self) -> None:
        """No group was made: what was placed ends with its processes."""
        self._watchdog.close()

    def _place_thread(self, thread: int, role: Role) -> None:
        if self._cores:
            os.sched_setaffinity(thread, self._cores)
        if role is Role.GUEST:
            os.setpriority(os.PRIO_PROCESS, thread, _NICEST)
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

    def _signal(self, signum: signal.Signals) -> None:
        """All that can be reached, before any that cannot is told of."""
        reached: set[int] = set()
        refused: dict[int, str] = {}
        for _ in range(_PASSES_MAX):
            # The number of a guest that is gone may be somebody else's by now.
            self._guests = {guest for guest in self._guests if guest.is_running()}
            alive = {one.pid for guest in self._guests for one in family(guest.pid)}
            if alive <= reached:
                break
            for pid in alive - reached:
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    continue
                except OSError as error:
                    refused[pid] = error.strerror or str(error)
            reached |= alive
        else:
            raise ClusterError(f"the guest starts processes faster than {signum.name} reaches them")
        if refused:
            raise ClusterError(f"{signum.name} does not reach processes of the guest: {refused}")


def checked_cores(cores: Collection[int]) -> frozenset[int]:
    """The cores, if processes may be put on them all, wherever this one runs. Raises ClusterError if not."""
    if not cores:
        return frozenset()
    with ThreadPoolExecutor(1, "cores") as thread:  # whose own cores are changed, and nobody else's
        granted = thread.submit(_granted_cores, frozenset(cores)).result()
    missing = sorted(set(cores) - granted)
    if missing:
        raise ClusterError(
            f"cores {missing} cannot be used here",
            expected="cores of this machine that the process's control group has",
        )
    return frozenset(cores)


def _granted_cores(cores: frozenset[int]) -> set[int]:
    """Those that the kernel gives to this thread, which asks for all."""
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError, OverflowError):  # not one of them, or no number of any
        return set()
    return os.sched_getaffinity(0)


def place_threads(pid: int, place: Callable[[int], None]) -> None:
    """Do something to every thread of a process and its descendants, also to those that appear meanwhile.

    Raises ClusterError if there is no such process, or the kernel refuses.
    """
    done: set[int] = set()
    for _ in range(_PASSES_MAX):
        threads = set(_threads(pid))
        if not threads:
            raise ClusterError(f"process {pid} is gone, and cannot be placed")
        if threads <= done:
            return
        for thread in threads - done:
            try:
                place(thread)
            except ProcessLookupError:
                continue
            except OSError as error:
                raise ClusterError(f"thread {thread} of process {pid} cannot be placed: {error.strerror}") from error
        done |= threads
    raise ClusterError(f"process {pid} starts threads faster than they can be placed")


def lower_sessions(pid: int) -> None:
    """Give the sessions of a process and its descendants the smallest weight, where the kernel weighs sessions.

    Nothing is done to this process's own session: serving may be part of it. A process that has just been forked is
    given a moment to begin its own. Raises ClusterError if the kernel refuses.
    """
    if not _weighs_sessions():
        return
    deadline_s = time.monotonic() + _SESSION_S
    while session_of(pid) != pid and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for session in {session_of(member.pid) for member in family(pid)} - {0, os.getsid(0)}:
        _lower(session)


def _lower(session: int) -> None:
    for attempt in range(_LOWER_ATTEMPTS):
        try:
            Path(f"/proc/{session}/autogroup").write_text(str(_NICEST), encoding="ascii")
        except FileNotFoundError:
            return  # its leader has ended; what is left of it cannot be reached
        except BlockingIOError as error:
            # Ten times a second for all users together, unless one is privileged.
            if attempt == _LOWER_ATTEMPTS - 1:
                raise ClusterError(
                    f"session {session} cannot be given the smallest weight: {error.strerror}"
                ) from error
            time.sleep(_LOWER_AGAIN_S)
        except OSError as error:
            raise ClusterError(f"session {session} cannot be given the smallest weight: {error.strerror}") from error
        else:
            return


def _weighs_sessions() -> bool:
    try:
        return _AUTOGROUP.read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


def _threads(pid: int) -> Iterator[int]:
    for member in family(pid):
        with contextlib.suppress(OSError):
            yield from (int(name) for name in os.listdir(f"/proc/{member.pid}/task"))
