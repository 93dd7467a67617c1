"""Two small processes between a starter and its program, so that nothing of the program outlives either of them.

    starter ── leader ── watcher ── program ── whatever that starts, however
               │         └ a session of its own, which no signal to the leader's group reaches
               └ the process that the starter knows; its session and group are the program's too

who dies             who notices             what happens
starter              kernel                  kills the leader
leader               watcher                 ends all below it, and itself
watcher              kernel, leader          kills the program; the leader ends all that was below the watcher
program              watcher, then leader    ends what is left; both end as the program did

Invariants
- Leader and watcher are subreapers: what leaves the program's group, or loses its parent, is still found below them.
- A signal to the leader's group is the program's: the leader is deaf. Until it is, the signal ends it, and so all.
- A leader is killed and a watcher woken even while they are stopped.
- The watcher does what `release` is before it ends by force what is left of the program: the only one that can.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

from rose.errors import ClusterError
from rose.processes import become_subreaper, die_with_parent, end_descendants, family, wake_with_parent

_NEWS = (signal.SIGCHLD, signal.SIGCONT)


def guarded(starter_pid: int, release: Callable[[Collection[int]], None]) -> int:
    """Put both guards between this process's parent and its caller: returns in the program, with its parent's pid.

    `release` is told the processes that the watcher is about to kill, and raises nothing; it must end by itself.
    This very process becomes the leader, so it must lead its session, and have one thread. Raises ClusterError if the
    kernel refuses, OSError if there can be no further process.
    """
    die_with_parent(starter_pid)
    become_subreaper()
    leader = os.getpid()
    watcher = os.fork()
    return _below_watcher(leader, release) if watcher == 0 else _lead(watcher)


def _lead(watcher: int) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _, status = os.waitpid(watcher, 0)
    _end(os.waitstatus_to_exitcode(status))


def _below_watcher(leader: int, release: Callable[[Collection[int]], None]) -> int:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NEWS)
    become_subreaper()
    wake_with_parent()
    watcher = os.getpid()
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return watcher
    return _watch(leader, program, release)


def _watch(leader: int, program: int, release: Callable[[Collection[int]], None]) -> NoReturn:
    os.setsid()
    code: int | None = None
    while code is None and os.getppid() == leader:
        code = _reaped(program)
        if code is None:
            signal.sigwait(_NEWS)
    if left := [one.pid for one in family(os.getpid())[1:]]:
        release(left)
    _end(1 if code is None else code)


def _reaped(program: int) -> int | None:
    """Reap every child that has ended, adopted ones too; the exit code of the program, if it was among them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _end(code: int) -> NoReturn:
    """End all descendants, then this process with an exit code, or by a signal where that is negative."""
    try:
        end_descendants(0)
    except ClusterError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left one, if that is wanted
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
