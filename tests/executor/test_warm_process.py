"""The warm process and its children: whoever dies, nobody is left over. Nothing here imports vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from rose.errors import ClusterError, EngineError
from rose.waits import WaitBoard
from rose_executor.launcher import Child, Command, Launcher, SpawnLauncher, log_tail
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
        until(lambda: "a value" in log_tail(tmp_path / "child.log"), "nothing in the log")
        assert log_tail(tmp_path / "child.log") == f"working in {tmp_path} with a value"
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
        assert says in log_tail(tmp_path / "child.log")
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
        assert not psutil.pid_exists(grandchild)

    with_warm(tmp_path, body)


def test_closing_ends_every_child(tmp_path: Path) -> None:
    seen: list[int] = []

    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path, "--deaf"))
        seen.extend((warm.pid, child.pid, written_pid(tmp_path / "grandchild")))
        await warm.close()
        assert await child.wait() == -signal.SIGKILL
        with pytest.raises(EngineError, match="the warm process has ended"):
            await warm.launch(family(tmp_path))

    with_warm(tmp_path, body)
    assert all(gone(pid) for pid in seen)


def test_a_killed_warm_process_takes_its_children_along(tmp_path: Path) -> None:
    async def body(warm: WarmProcess) -> None:
        child = await warm.launch(family(tmp_path, "--deaf"))
        grandchild = written_pid(tmp_path / "grandchild")
        os.kill(warm.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL
        until(lambda: gone(child.pid) and gone(grandchild), "children outlived the warm process")
        with pytest.raises(EngineError, match="the warm process has ended"):
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

    with pytest.raises(EngineError, match="No module named 'no_such_module'"):
        asyncio.run(run())


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
        assert child.pid == written_pid(tmp_path / "child")
        grandchild = written_pid(tmp_path / "grandchild")
        assert os.getpgid(grandchild) == child.pid
        os.kill(child.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL
        until(lambda: gone(grandchild), "the grandchild outlived its parent")

    asyncio.run(run())
