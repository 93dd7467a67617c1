"""Which processes of a guest somebody else has stopped: asked of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from process_tools import until

from rose.processes import family
from rose_executor import guest_stopped
from rose_executor.guest_stopped import stopped_processes

PROGRAM = "import os, time; os.fork(); time.sleep(600)"


@contextmanager
def two_processes() -> Iterator[list[int]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], start_new_session=True) as process:
        try:
            until(lambda: len(family(process.pid)) == 2, "no second process")
            yield [one.pid for one in family(process.pid)]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_each_process_that_is_stopped_is_named_until_it_goes_on() -> None:
    with two_processes() as pids:
        leader, child = pids
        assert stopped_processes(leader) == ()
        os.kill(child, signal.SIGSTOP)
        until(lambda: stopped_processes(leader) == (child,), "the child was not seen to stand still")
        os.kill(leader, signal.SIGSTOP)
        until(lambda: stopped_processes(leader) == (leader, child), "the leader was not seen to stand still")
        os.killpg(leader, signal.SIGCONT)
        until(lambda: stopped_processes(leader) == (), "they were not seen to go on")
    assert stopped_processes(leader) == ()


TRACED = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGTRAP)"


def test_one_that_a_debugger_holds_is_named() -> None:
    """It asks for this process to trace it (PTRACE_TRACEME), and is stopped where a breakpoint would stop it."""
    with subprocess.Popen([sys.executable, "-c", TRACED], start_new_session=True) as traced:
        try:
            until(lambda: stopped_processes(traced.pid) == (traced.pid,), "the traced one was not seen to stand still")
            assert psutil.Process(traced.pid).status() == psutil.STATUS_TRACING_STOP
        finally:
            traced.kill()


STARTER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PROGRAM!r}])"


def test_what_started_it_is_named_too_for_nobody_else_hears_of_its_end() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], start_new_session=True) as starter:
        try:
            until(lambda: len(family(starter.pid)) == 3, "no guest")
            guest = family(starter.pid)[1].pid
            assert stopped_processes(guest) == ()
            os.kill(starter.pid, signal.SIGSTOP)
            until(lambda: stopped_processes(guest) == (starter.pid,), "the starter was not seen to stand still")
            os.kill(guest, signal.SIGKILL)
            assert stopped_processes(guest) == (starter.pid,)
            os.kill(starter.pid, signal.SIGCONT)
            until(lambda: stopped_processes(guest) == (), "it was not seen to go on")
        finally:
            os.killpg(starter.pid, signal.SIGKILL)


def test_one_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_processes() as (leader, child):
        members = [psutil.Process(leader), psutil.Process(child)]
    monkeypatch.setattr(guest_stopped, "family", lambda pid: members)
    assert stopped_processes(leader) == ()
