"""The warm process and its children: whoever dies, nobody is left over. Nothing here imports vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from rose.errors import ClusterError, DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose_executor import warm_main, warm_process
from rose_executor.launcher import Child, Command, Launcher, LauncherDied, SpawnLauncher
from rose_executor.warm_main import WarmServer
from rose_executor.warm_process import WarmProcess

HELPERS = Path(__file__).parent
DEADLINE_S = 20.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def written_pid(file: Path) -> int:
    until(lambda: file.exists() and file.read_text(), f"{file.name} was never written")
    return int(file.read_text())


def gone(pid: int) -> bool:
    """A zombie that a foreign parent has not reaped yet counts as gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def start_warm(folder: Path, waits: WaitBoard | None = None) -> WarmProcess:
    return await WarmProcess.start(
        waits if waits is not None else WaitBoard(),
        log_path=folder / "warm.log",
        env={"PYTHONPATH": str(HELPERS)},
        modules=("json",),
    )


def family(folder: Path, *arguments: str, **env: str | None) -> Command:
    return Command("family_main", (str(folder), *arguments), folder / "child.log", folder, env)


def with_warm(folder: Path, body: Callable[[WarmProcess], Awaitable[None]]) -> None:
    async def run() -> None:
        warm = await start_warm(folder)
        try:
            await body(warm)
        finally:
            with contextlib.suppress(EngineError):
                await warm.close()

    asyncio.run(run())


def test_a_child_runs_where_and_as_it_was_told(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path, ROSE_TEST="a value", PATH=None))
        assert child.pid == written_pid(tmp_path / "child")
        assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
        until(lambda: "a value\n" in (tmp_path / "child.log").read_text(), "nothing in the log")
        assert (tmp_path / "child.log").read_text().strip() == f"working in {tmp_path} with a value"
        assert child.exit_code is None

    with_warm(tmp_path, body)


@pytest.mark.parametrize(
    ("module", "arguments", "code", "says"),
    [("json.tool", ("--no-such",), 2, "usage"), ("no_such_module", (), 1, "No module named no_such_module")],
)
def test_a_childs_end_is_reported_with_its_code(
    tmp_path: Path, module: str, arguments: tuple[str, ...], code: int, says: str
) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(Command(module, arguments, tmp_path / "child.log", tmp_path))
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == code
        assert child.exit_code == code
        assert says in (tmp_path / "child.log").read_text()
        child.signal(signal.SIGKILL)

    with_warm(tmp_path, body)


def test_a_signal_reaches_the_whole_group_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path))
        grandchild = written_pid(tmp_path / "grandchild")
        child.signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGTERM
        assert not psutil.pid_exists(grandchild)

    with_warm(tmp_path, body)


def test_when_only_the_leader_is_killed_its_children_are_gone_before_its_end_is_reported(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path, "--deaf"))
        grandchild = written_pid(tmp_path / "grandchild")
        os.kill(written_pid(tmp_path / "child"), signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL
        assert child.death() == "ended with code -9"
        assert not psutil.pid_exists(grandchild)

    with_warm(tmp_path, body)


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "with the answer"])
def test_a_child_whose_launch_is_cancelled_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    children: list[Child] = []

    async def body(warm: WarmProcess) -> None:
        launching = asyncio.create_task(warm.launch(family(tmp_path)))
        receive = warm._receive

        def cancelled_meanwhile(message: dict[str, object]) -> None:
            if not answered:
                launching.cancel()
                asyncio.get_running_loop().call_soon(receive, message)
                return
            receive(message)
            launching.cancel()

        monkeypatch.setattr(warm, "_receive", cancelled_meanwhile)
        with pytest.raises(asyncio.CancelledError):
            await launching
        monkeypatch.setattr(warm, "_receive", receive)
        await asyncio.sleep(0)
        children.extend(warm._children.values())
        (child,) = children
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL

    with_warm(tmp_path, body)


def test_a_child_whose_answer_comes_as_its_time_is_up_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_process, "_FORK_TIMEOUT_S", 0.5)

    async def body(warm: WarmProcess) -> None:
        receive = warm._receive

        def heard_late(message: dict[str, object]) -> None:
            time.sleep(0.6)  # the loop's next turn has the answer, and right behind it the end of its time
            asyncio.get_running_loop().call_soon(receive, message)

        monkeypatch.setattr(warm, "_receive", heard_late)
        with pytest.raises(DeadlineExceeded, match="no fork after"):
            await warm.launch(family(tmp_path))
        monkeypatch.setattr(warm, "_receive", receive)
        (child,) = warm._children.values()
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL

    with_warm(tmp_path, body)


def test_closing_ends_every_child(tmp_path: Path) -> None:
    seen: list[int] = []

    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path, "--deaf"))
        seen.extend((warm.pid, child.pid, written_pid(tmp_path / "grandchild")))
        await warm.close()
        assert await child.wait() == -signal.SIGKILL
        with pytest.raises(LauncherDied, match="the warm process is closed"):
            await warm.launch(family(tmp_path))

    with_warm(tmp_path, body)
    assert all(gone(pid) for pid in seen)


def test_a_killed_warm_process_takes_its_children_along(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path, "--deaf"))
        grandchild = written_pid(tmp_path / "grandchild")
        os.kill(warm.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL
        assert child.death() == "died with the warm process"
        until(lambda: gone(child.pid) and gone(grandchild), "children outlived the warm process")
        child.signal(signal.SIGTERM)
        for _ in range(2):
            with pytest.raises(LauncherDied, match=r"the warm process died \(signal 9\); see .*warm\.log"):
                await warm.launch(family(tmp_path))

    with_warm(tmp_path, body)


def test_a_killed_owner_leaves_no_process(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, str(HELPERS / "owner_main.py"), str(tmp_path)])
    family_pids = [written_pid(tmp_path / name) for name in ("owner", "warm", "child", "grandchild")]
    owner.kill()
    owner.wait()
    until(lambda: all(gone(pid) for pid in family_pids), f"left over: {family_pids}")


def test_a_warm_process_that_cannot_import_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        await WarmProcess.start(WaitBoard(), log_path=tmp_path / "warm.log", modules=("no_such_module",))

    with pytest.raises(LauncherDied, match="ended with code 1: ModuleNotFoundError: No module named 'no_such_module'"):
        asyncio.run(run())


def test_a_child_asked_for_while_the_warm_process_dies_is_refused(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path))
        os.kill(warm.pid, signal.SIGKILL)
        until(lambda: gone(warm.pid), "the warm process survived")
        # The loop has had no chance to notice: these two write to a broken pair.
        child.signal(signal.SIGTERM)
        with pytest.raises(LauncherDied, match=r"died \(signal 9\)"):
            await warm.launch(family(tmp_path))
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL

    with_warm(tmp_path, body)


def test_a_start_that_is_cancelled_ends_at_once_and_leaves_nothing_unheard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sleeps here while it imports, deaf to its owner, for far longer than a close would wait."""
    monkeypatch.setattr(warm_process, "_CLOSE_TIMEOUT_S", 0.1)
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'on')!r}).touch()\ntime.sleep(600)"
    )
    unheard: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        starting = asyncio.create_task(
            WarmProcess.start(
                WaitBoard(), log_path=tmp_path / "warm.log", env={"PYTHONPATH": str(tmp_path)}, modules=("slow",)
            )
        )
        async with asyncio.timeout(DEADLINE_S):
            while not (tmp_path / "on").exists():
                await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        gc.collect()

    asyncio.run(run())
    gc.collect()
    assert unheard == []


def test_no_file_of_the_current_directory_shadows_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = tmp_path / "here"
    shadow.mkdir()
    for name in ("json", "selectors", "runpy"):
        (shadow / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(shadow)

    async def body(warm: WarmProcess) -> None:
        for launcher in (warm, SpawnLauncher()):
            child = await launcher.launch(Command("json.tool", ("--help",), tmp_path / "child.log", shadow))
            assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0

    with_warm(tmp_path, body)
    assert "shadowed" not in (tmp_path / "child.log").read_text()


def test_a_refused_fork_is_told_and_the_warm_process_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = WarmServer(theirs)
        monkeypatch.setattr(warm_main, "thread_count", lambda: 1)
        monkeypatch.setattr(os, "fork", refuse)
        fork = {"module": "m", "arguments": [], "env": {}, "cwd": "/", "log_path": str(tmp_path / "log")}
        ours.sendall(json.dumps({"id": 1, "fork": fork}).encode() + b"\n")
        ours.shutdown(socket.SHUT_WR)
        server.serve()
        said = [json.loads(line) for line in ours.recv(65_536).splitlines()]
    assert said == [{"ready": True}, {"id": 1, "error": "no more processes"}]


def test_a_warm_process_with_threads_refuses_to_fork(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    )

    async def run() -> None:
        warm = await WarmProcess.start(
            WaitBoard(), log_path=tmp_path / "warm.log", env={"PYTHONPATH": str(tmp_path)}, modules=("threaded",)
        )
        try:
            await warm.launch(family(tmp_path))
        finally:
            await warm.close()

    with pytest.raises(ClusterError, match="2 threads"):
        asyncio.run(run())


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        for launcher in (warm, SpawnLauncher()):
            with pytest.raises(ClusterError, match="No such file"):
                await launcher.launch(Command("json.tool", (), tmp_path / "no" / "log", tmp_path))

    with_warm(tmp_path, body)


def test_waits_are_named(tmp_path: Path) -> None:
    async def run() -> None:
        waits = WaitBoard()
        starting = asyncio.create_task(start_warm(tmp_path, waits))
        while not waits.snapshot():
            await asyncio.sleep(0.001)
        assert [(wait.what, wait.whom) for wait in waits.snapshot()] == [("warm process start", "warm process")]
        warm = await starting
        await warm.close()
        assert waits.snapshot() == ()

    asyncio.run(run())


def test_spawning_keeps_the_same_promises(tmp_path: Path) -> None:
    async def run() -> None:
        launcher: Launcher = SpawnLauncher()
        command = family(tmp_path, PYTHONPATH=os.pathsep.join([str(HELPERS), *sys.path]), ROSE_TEST="a value")
        child: Child = await launcher.launch(command)
        assert os.getsid(written_pid(tmp_path / "child")) == child.pid
        grandchild = written_pid(tmp_path / "grandchild")
        assert os.getpgid(grandchild) == child.pid
        os.kill(child.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL
        until(lambda: gone(grandchild), "the grandchild outlived its parent")

    asyncio.run(run())
