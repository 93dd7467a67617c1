"""Processes of the demo: started and placed, ended in order, never left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rose.demo import kept
from rose.demo.child import Program, start_child
from rose.demo.cores import Cores, Placing, split_cores
from rose.demo.kept import KeptChild
from rose.demo.under_watch import under_watch
from rose.errors import ClusterError, EngineError
from rose.processes import session_of
from rose.waits import WaitBoard

DEADLINE_S = 60.0


def anywhere(pid: int) -> None:
    """Where the test itself runs."""


def server(log: Path) -> Program:
    return Program("server", "http.server", ("0", "--bind", "127.0.0.1"), log)


def test_a_child_is_placed_leads_its_own_session_and_ends_when_asked(tmp_path: Path) -> None:
    placed: list[int] = []

    async def run() -> None:
        waits = WaitBoard()
        child = await start_child(server(tmp_path / "log"), placed.append, waits)
        assert placed == [child.pid]
        assert os.getsid(child.pid) == child.pid
        assert child.exit_code is None
        await child.stop(DEADLINE_S)
        assert child.exit_code == -signal.SIGTERM
        assert child.death() == "was killed by SIGTERM"
        await child.stop(DEADLINE_S)
        assert waits.snapshot() == ()

    asyncio.run(run())


def test_one_that_does_not_end_when_asked_is_ended_by_force(tmp_path: Path) -> None:
    async def run() -> None:
        log, path = tmp_path / "log", {"PYTHONPATH": str(Path(__file__).parent)}
        child = await start_child(Program("stubborn", "stubborn_main", ("600",), log, path), anywhere, WaitBoard())
        async with asyncio.timeout(DEADLINE_S):
            while "begun" not in log.read_text():
                await asyncio.sleep(0.02)
        await child.stop(0.2)
        assert child.exit_code == -signal.SIGKILL

    asyncio.run(run())


def test_one_that_fails_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    async def run() -> None:
        program = Program("wrong", "rose.workload.load_main", ("--no-such-option",), tmp_path / "log")
        child = await start_child(program, anywhere, WaitBoard())
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 2
        assert child.death().startswith("ended with 2")
        assert "no-such-option" in child.death()

    asyncio.run(run())


def test_one_that_cannot_be_placed_is_not_left(tmp_path: Path) -> None:
    pids: list[int] = []

    def refuse(pid: int) -> None:
        pids.append(pid)
        raise ClusterError("no room")

    async def run() -> None:
        with pytest.raises(ClusterError, match=r"server .* was not placed: no room"):
            await start_child(server(tmp_path / "log"), refuse, WaitBoard())

    asyncio.run(run())
    assert not psutil.pid_exists(pids[0])


def test_it_dies_with_its_director_however_that_ends() -> None:
    main = Path(__file__).with_name("lonely_director_main.py")
    director = subprocess.Popen([sys.executable, str(main)], stdout=subprocess.PIPE, text=True)
    assert director.stdout is not None
    pid = int(next(line for line in director.stdout if line.startswith("pid")).split()[1])
    child = psutil.Process(pid)
    director.kill()
    director.wait()
    psutil.wait_procs([child], timeout=DEADLINE_S)
    assert not child.is_running()


def test_a_kept_child_is_started_again_and_at_last_given_up() -> None:
    said: list[str] = []
    started: list[int] = []

    async def run() -> KeptChild:
        child = KeptChild(
            Program("brief", "platform", (), Path(os.devnull)),
            anywhere,
            WaitBoard(),
            lambda state, _: said.append(state),
        )
        child.started = started.append
        await asyncio.wait_for(child.keep(), DEADLINE_S)
        await child.stop()
        return child

    asyncio.run(run())
    assert said == ["running", "dead"] * (kept.RESTARTS_MAX + 1) + ["given up"]
    assert len(set(started)) == kept.RESTARTS_MAX + 1


def test_a_kept_child_is_ended_for_good_when_it_is_no_longer_wanted(tmp_path: Path) -> None:
    async def run() -> None:
        child = KeptChild(server(tmp_path / "log"), anywhere, WaitBoard(), lambda state, detail: None)
        await child.stop()
        keeping = asyncio.create_task(child.keep())
        while child.child is None:
            await asyncio.sleep(0.01)
        keeping.cancel()
        await child.stop()
        assert child.child.exit_code is not None

    asyncio.run(run())


def test_a_fact_of_a_kept_child_is_that_of_whichever_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        path = {"PYTHONPATH": str(Path(__file__).parent)}
        program = Program("teller", "teller_main", (str(tmp_path / "out"),), tmp_path / "log", path)
        child = KeptChild(program, anywhere, WaitBoard(), lambda state, detail: None)
        keeping = asyncio.create_task(child.keep())
        first = await child.fact("address", DEADLINE_S)
        killed = child.child
        assert killed is not None
        assert session_of(int(first.removeprefix("process "))) == killed.pid
        killed.send(signal.SIGKILL)
        await killed.wait()
        second = await child.fact("address", DEADLINE_S)
        assert child.child is not None
        assert session_of(int(second.removeprefix("process "))) == child.child.pid != killed.pid
        keeping.cancel()
        await child.stop()

    with tempfile.TemporaryDirectory(prefix="rose-") as root:  # short, because it holds unix sockets
        monkeypatch.setenv("ROSE_RUNTIME_DIR", root)
        asyncio.run(run())


def test_whoever_waits_for_a_fact_of_one_that_never_starts_is_told_that_it_was_given_up() -> None:
    def refuse(pid: int) -> None:
        raise ClusterError("no room")

    async def run() -> None:
        program = Program("brief", "platform", (), Path(os.devnull))
        child = KeptChild(program, refuse, WaitBoard(), lambda state, detail: None)
        keeping = asyncio.create_task(child.keep())
        with pytest.raises(ClusterError, match="brief was given up"):
            await child.fact("address", DEADLINE_S)
        await keeping

    asyncio.run(run())


def test_one_core_is_too_few() -> None:
    assert split_cores({5, 2, 9}) == Cores(frozenset({2}), frozenset({5, 9}))
    with pytest.raises(ClusterError, match="one core"):
        split_cores({3})


def test_everything_has_its_place(tmp_path: Path) -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("two cores are needed to tell two places apart")
    cores = split_cores(usable)

    async def run() -> None:
        placing = Placing(cores)
        children = []
        for place in (placing.with_serving, placing.with_load, placing.behind_load):
            children.append(await start_child(server(tmp_path / "log"), place, WaitBoard()))
        where = [frozenset(os.sched_getaffinity(child.pid)) for child in children]
        assert where == [cores.serving, cores.others, cores.others]
        groups = [Path(f"/proc/{child.pid}/cgroup").read_text() for child in children]
        classes = [os.sched_getscheduler(child.pid) for child in children]
        assert groups[0] == groups[1]
        assert classes[:2] == [os.SCHED_OTHER] * 2
        # The last gives way: by a group of its own, or else by its class.
        assert groups[2] != groups[1] or classes[2] == os.SCHED_IDLE
        for child in children:
            await child.stop(DEADLINE_S)
        placing.close()

    asyncio.run(run())


def test_work_under_watch_ends_with_its_result_and_leaves_nothing() -> None:
    ended: list[str] = []

    async def beside(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    async def work() -> int:
        await asyncio.sleep(0.05)
        return 7

    assert asyncio.run(under_watch(work(), beside("short", 0.0), beside("long", 600))) == 7
    assert ended == ["short", "long"]


def test_what_is_watched_ends_the_work_by_failing() -> None:
    async def fails() -> None:
        raise EngineError("the serving engine died")

    async def work() -> None:
        await asyncio.sleep(600)

    with pytest.raises(EngineError, match="serving engine died"):
        asyncio.run(under_watch(work(), fails()))
