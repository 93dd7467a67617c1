"""Each test runs a script of its own, since it changes what a whole process does with children and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from rose.processes import INTERRUPTED_STATUS, family

HEAD = """
import os, signal, subprocess, sys, time
from rose.processes import become_subreaper, die_with_parent, end_descendants, two_stage_stop

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # which a signal's handler may do, too
def sleeper(ignores_term=False):
    # Says that it is ready, so that no signal comes before its handler stands.
    trap = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignores_term else ""
    code = f"import signal, time; {trap} print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    return child
"""
Script = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def script() -> Iterator[Script]:
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(body)], stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(10)
        assert child.stdout is not None
        child.stdout.close()


def said(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_children_end_gently_and_the_deaf_ones_by_force(script: Script) -> None:
    child = script(
        """
        children = [sleeper(), sleeper(ignores_term=True)]
        say(end_descendants(grace_s=0.3))
        say(*[one.wait() for one in children])
        """
    )
    assert said(child) == ["2"]
    # Reaped by `end_descendants` already, so Popen learns no more than that they are gone.
    assert said(child) == ["0", "0"]


@pytest.mark.parametrize(("grace_s", "heard"), [(5, ["heard", "asked"]), (0, ["heard"])])
def test_children_are_asked_first_if_there_is_grace(script: Script, grace_s: int, heard: list[str]) -> None:
    child = script(
        f"""
        code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit('asked'));"
        code += "print('ready', flush=True); time.sleep(60)"
        piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        one = subprocess.Popen([sys.executable, "-c", code], **piped)
        one.stdout.readline()
        end_descendants(grace_s={grace_s})
        say("heard", one.stderr.read())
        """
    )
    assert said(child) == heard


def test_a_subreaper_ends_also_what_its_children_left_behind(script: Script) -> None:
    child = script(
        """
        become_subreaper()
        read, write = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(write, str(os.getpid()).encode())
                time.sleep(60)
            os._exit(0)
        orphan = int(os.read(read, 20))
        os.wait()
        say(orphan)
        say(end_descendants(grace_s=0))
        """
    )
    (orphan,) = said(child)
    assert said(child) == ["1"]
    assert not psutil.pid_exists(int(orphan))


def test_nothing_to_end_is_no_error(script: Script) -> None:
    assert said(script("say(end_descendants(grace_s=1))")) == ["0"]


def test_a_child_dies_with_a_killed_parent(script: Script) -> None:
    child = script(
        """
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            say(os.getpid())
            time.sleep(60)
        time.sleep(60)
        """
    )
    (pid,) = said(child)
    child.kill()
    assert is_gone(int(pid))


def test_a_child_whose_parent_is_gone_already_ends_at_once(script: Script) -> None:
    child = script("say('begins'); die_with_parent(os.getppid() + 1); say('goes on')")
    assert said(child) == ["begins"]
    assert child.wait(10) == 1


STOPPABLE = """
    child = sleeper()
    asked = []
    with two_stage_stop(lambda: asked.append(1), lambda: say("now")):
        say(child.pid)
        while not asked: time.sleep(0.01)
        say("asked")
        {after}
    say("end")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_only_asks(script: Script, signum: signal.Signals) -> None:
    child = script(STOPPABLE.format(after="end_descendants(1)"))
    (pid,) = said(child)
    child.send_signal(signum)
    assert said(child) == ["asked"]
    assert said(child) == ["end"]
    assert child.wait(10) == 0
    assert is_gone(int(pid))


def test_the_second_signal_ends_everything_now(script: Script) -> None:
    child = script(STOPPABLE.format(after="time.sleep(60)"))
    (pid,) = said(child)
    child.send_signal(signal.SIGINT)
    assert said(child) == ["asked"]
    child.send_signal(signal.SIGINT)
    assert said(child) == ["now"]
    assert child.wait(10) == INTERRUPTED_STATUS
    assert is_gone(int(pid))


def test_the_second_signal_ends_also_when_tidying_fails(script: Script) -> None:
    body = STOPPABLE.format(after="time.sleep(60)").replace('lambda: say("now")', "lambda: 1 / 0")
    child = script(body)
    said(child)
    child.send_signal(signal.SIGTERM)
    assert said(child) == ["asked"]
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == INTERRUPTED_STATUS


def test_handlers_are_put_back_and_nohup_is_kept(script: Script) -> None:
    child = script(
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
        with two_stage_stop(lambda: None, lambda: None):
            say(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
        say(before == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)])
        """
    )
    assert said(child) == ["True"]
    assert said(child) == ["True"]


def test_the_first_signal_wakes_a_sleeping_event_loop(script: Script) -> None:
    child = script(
        """
        import asyncio
        async def main():
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            with two_stage_stop(lambda: loop.call_soon_threadsafe(stop.set), lambda: None):
                say("sleeps")
                await stop.wait()
                say("stopped")
        asyncio.run(main())
        """
    )
    assert said(child) == ["sleeps"]
    child.send_signal(signal.SIGINT)
    assert said(child) == ["stopped"]
    assert child.wait(10) == 0


def test_a_family_is_a_process_and_all_below_it_and_one_that_is_gone_has_none(script: Script) -> None:
    child = script(
        """
        grandchild = "import os, time; print('below', os.getpid(), flush=True); time.sleep(60)"
        code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
        inner = subprocess.Popen([sys.executable, "-c", code, grandchild])
        say('inner', inner.pid)
        inner.wait()
        """
    )
    pids = dict((said(child), said(child)))
    inner, grandchild = int(pids["inner"]), int(pids["below"])
    assert {one.pid for one in family(child.pid)} == {child.pid, inner, grandchild}
    assert family(child.pid)[0].pid == child.pid
    os.kill(grandchild, signal.SIGKILL)
    assert is_gone(inner)
    child.wait(10)
    assert family(child.pid) == []


def test_a_process_that_ends_while_its_family_is_asked_for_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "children", gone)
    assert family(os.getpid()) == []
