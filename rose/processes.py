"""Processes that never outlive the run.

Three nets, each for the failure of the one before: the owner ends its children in order; a subreaper adopts
what its children leave behind, so that `end_descendants` finds it; the kernel kills a child whose parent died.
Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

import psutil

from rose.errors import ClusterError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 5.0
INTERRUPTED_STATUS = 130
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_at_forced_exit: list[Callable[[], None]] = []


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that none of them escapes `end_descendants`.

    Raises ClusterError if the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process as soon as its parent is gone; call it first in a child.

    `parent_pid` is `os.getpid()` as the parent saw it before it forked: if the parent died in between, this
    process ends at once. "Parent" is the thread that forked, so fork from one that lives as long as the process.
    Raises ClusterError if the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def wake_with_parent() -> None:
    """Have the kernel send SIGCONT to this process when its parent is gone, for it to look at `os.getppid()`.

    That makes even a stopped process go on. As with `die_with_parent`, the parent may be gone by now: look once at
    once. Raises ClusterError if the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def forked_children_die_with_parent() -> None:
    """Let every later `os.fork` of this process, multiprocessing's included, call `die_with_parent` in the child."""
    parents: list[int] = []

    def before() -> None:
        parents[:] = [os.getpid()]

    def after_in_child() -> None:
        die_with_parent(parents[0])

    os.register_at_fork(before=before, after_in_child=after_in_child)


def session_of(pid: int) -> int:
    """The session that a process belongs to, which is the pid of the one that began it; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def family(pid: int) -> list[psutil.Process]:
    """A process, then all its descendants: those that are there now, none if it is gone itself."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ClusterError(f"prctl({option}): {reason}", expected="a Linux kernel that knows it")


def end_descendants(grace_s: float) -> int:
    """End every descendant of this process: SIGTERM, up to `grace_s` seconds, then SIGKILL. Returns how many.

    With `become_subreaper` this includes those whose own parent has died. Zombies are reaped.
    Raises ClusterError if one is still there after SIGKILL (stuck in the kernel).
    """
    ended: set[int] = set()
    if grace_s > 0:
        _signal_all(signal.SIGTERM, ended)
        _wait_until_gone(grace_s)
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while _signal_all(signal.SIGKILL, ended):
        # Those killed may have had children that are ours only now: look again until there are none.
        _wait_until_gone(0.5)
        if time.monotonic() >= deadline_s:
            left = [child.pid for child in _descendants()]
            if left:
                raise ClusterError(
                    f"processes {left} survive SIGKILL", to_do="look at them with ps; the kernel has them"
                )
    return len(ended)


def _descendants() -> list[psutil.Process]:
    return family(os.getpid())[1:]


def _signal_all(signum: signal.Signals, ended: set[int]) -> bool:
    children = _descendants()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signum)
        ended.add(child.pid)
    return bool(children)


def _wait_until_gone(timeout_s: float) -> None:
    psutil.wait_procs(_descendants(), timeout=timeout_s)


@contextmanager
def at_forced_exit(tidy: Callable[[], None]) -> Iterator[None]:
    """While the body runs, the second signal of `two_stage_stop` calls `tidy` last of all.

    It interrupts any code anywhere, so `tidy` must take no lock and write to nothing that buffers.
    """
    _at_forced_exit.append(tidy)
    try:
        yield
    finally:
        _at_forced_exit.remove(tidy)


@contextmanager
def two_stage_stop(on_stop: Callable[[], None], on_now: Callable[[], None]) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP while the body runs: the first stops cleanly, the second now.

    The first calls `on_stop`, in the main thread at any point of its work; with asyncio let it do no more than
    `loop.call_soon_threadsafe(...)`. The second calls `on_now` (what must not stay behind: `Run.close`),
    kills all descendants, does what `at_forced_exit` was given, and leaves the process with status 130.
    Main thread only.
    """
    asked = False

    def handle(_signum: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            on_stop()
            return
        # A third must not interrupt the second.
        for signum in _STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        with ExitStack() as last:  # each of these, from the last up, whatever the others raise
            last.callback(os._exit, INTERRUPTED_STATUS)
            for tidy in _at_forced_exit:
                last.callback(tidy)
            last.callback(on_now)
            end_descendants(0)

    # Under nohup a hang-up is already ignored, and stays so.
    before = {one: signal.getsignal(one) for one in _STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
