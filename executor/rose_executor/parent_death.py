"""A child ends with its parent, whatever ended the parent (Linux PR_SET_PDEATHSIG).

The kernel ties the signal to the *thread* that forked, so children must be forked from a thread that
lives as long as its process: the main one.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL when the parent ends; end now if it already has.

    Raises OSError if the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def forked_children_die_with_parent() -> None:
    """Let every later `os.fork` of this process (multiprocessing's included) call `die_with_parent`."""
    parents: list[int] = []

    def before() -> None:
        parents[:] = [os.getpid()]

    def after_in_child() -> None:
        die_with_parent(parents[0])

    os.register_at_fork(before=before, after_in_child=after_in_child)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that they can be reaped.

    Raises OSError if the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
