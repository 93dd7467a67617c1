"""Whoever of starter, leader, watcher and program dies: nothing is left of the program, wherever it went."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rose_executor.launcher import Child, Command, SpawnLauncher

HELPERS = Path(__file__).parent
DEADLINE_S = 60.0
PATH = {"PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])}


@dataclass(frozen=True)
class Family:
    """The four processes of a program that has started one."""

    leader: psutil.Process
    watcher: psutil.Process
    program: psutil.Process
    stray: psutil.Process

    def gone(self) -> bool:
        """A zombie that a foreign parent has not reaped yet counts as gone."""
        return not any(_lives(one) for one in (self.leader, self.watcher, self.program, self.stray))


def _lives(one: psutil.Process) -> bool:
    try:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def family(folder: Path, leader: int) -> Family:
    ids = folder / "ids"
    until(lambda: ids.exists() and len(ids.read_text().split()) == 3, "the program does not begin")
    return Family(psutil.Process(leader), *(psutil.Process(int(pid)) for pid in ids.read_text().split()))


def guarding(folder: Path, end: str, body: Callable[[Child], Awaitable[None]]) -> int:
    """Run a program below guards; how it ended for its starter."""

    async def run() -> int:
        command = Command("guarded_family_main", (str(folder), end), folder / "log", folder, PATH)
        child = await SpawnLauncher().launch(command)
        try:
            await body(child)
        except BaseException:
            child.signal(signal.SIGKILL)
            raise
        return await asyncio.wait_for(child.wait(), DEADLINE_S)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("who", "stopped"),
    [("leader", False), ("leader", True), ("watcher", False), ("program", False), ("group", False), ("group", True)],
)
def test_one_that_is_killed_takes_all_along(tmp_path: Path, who: str, stopped: bool) -> None:
    async def body(child: Child) -> None:
        here = family(tmp_path, child.pid)
        if stopped:
            for one in (here.leader, here.watcher, here.program, here.stray):
                one.suspend()
        if who == "group":
            child.signal(signal.SIGKILL)
        else:
            getattr(here, who).kill()
        until(here.gone, f"something outlived the {who}")

    assert guarding(tmp_path, "sleep", body) == -signal.SIGKILL


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_starter_takes_all_along(tmp_path: Path, stopped: bool) -> None:
    command = [sys.executable, str(HELPERS / "guard_owner_main.py"), str(tmp_path)]
    owner = subprocess.Popen(command, env={**os.environ, **PATH})
    leader = tmp_path / "leader"
    until(lambda: leader.exists() and leader.read_text(), "nothing was spawned")
    here = family(tmp_path, int(leader.read_text()))
    if stopped:
        for one in (here.leader, here.watcher, here.program, here.stray):
            one.suspend()
    owner.kill()
    owner.wait()
    until(here.gone, "something outlived the starter")


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_ends_leaves_nothing_and_its_code_is_told(tmp_path: Path, code: int) -> None:
    async def body(child: Child) -> None:
        pass

    assert guarding(tmp_path, str(code), body) == code
    stray = int((tmp_path / "ids").read_text().split()[2])
    assert not psutil.pid_exists(stray)


@pytest.mark.parametrize(("end", "code"), [("polite", 7), ("sleep", -signal.SIGTERM)])
def test_a_signal_to_the_group_is_the_programs_and_so_is_its_end(tmp_path: Path, end: str, code: int) -> None:
    here: list[Family] = []

    async def body(child: Child) -> None:
        here.append(family(tmp_path, child.pid))
        assert os.getsid(here[0].program.pid) == os.getpgid(here[0].program.pid) == child.pid
        child.signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == code

    assert guarding(tmp_path, end, body) == code
    assert here[0].gone()
    assert not psutil.pid_exists(here[0].stray.pid)
