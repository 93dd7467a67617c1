"""How a guest's processes are ended: released by its host first, killed in any case, thawed to die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from rose.errors import ClusterError, DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose_executor import engine_process
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.launcher import Child, Command, SpawnedChild

DEADLINE_S = 60.0


class Host:
    """Notes what it is asked, and whether the guest lived then."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.told: list[tuple[str, bool]] = []
        self.process: EngineProcess | None = None

    def guest_env(self) -> dict[str, str | None]:
        if self.trouble:
            raise ClusterError(self.trouble)
        return {"HOSTED": "yes", "HOME": None}

    def release(self, pid: int) -> None:
        self._note("release")
        if self.trouble:
            raise ClusterError(self.trouble)

    def thaw(self) -> None:
        self._note("thaw")

    def _note(self, what: str) -> None:
        assert self.process is not None
        self.told.append((what, self.process.alive))


class Frozen(Host):
    """Its guest is frozen, and does not die before a thaw succeeds; `failures` are those of the next thaws."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        self.thawed = asyncio.Event()

    def thaw(self) -> None:
        super().thaw()
        if self.failures:
            raise self.failures.pop(0)
        self.thawed.set()


class FrozenChild(SpawnedChild):
    """A child that hears of a signal when it is thawed, as one in a frozen group does."""

    def __init__(self, process: asyncio.subprocess.Process, thawed: asyncio.Event) -> None:
        super().__init__(process)
        self._thawed = thawed
        self._heard = list[asyncio.Task[None]]()

    def signal(self, signum: signal.Signals) -> None:
        async def hear() -> None:
            await self._thawed.wait()
            SpawnedChild.signal(self, signum)

        self._heard.append(asyncio.create_task(hear()))


class Keeping:
    """A launcher whose engines say what they were started with, and never answer."""

    def __init__(self, thawed: asyncio.Event | None = None) -> None:
        self._thawed = thawed
        self.commands: list[Command] = []
        self.launched = asyncio.Event()

    async def launch(self, command: Command) -> Child:
        self.commands.append(command)
        sleeps = "import time; time.sleep(600)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", sleeps, start_new_session=True)
        self.launched.set()
        return SpawnedChild(process) if self._thawed is None else FrozenChild(process, self._thawed)


def ending(
    folder: Path, model: Path, host: Host | None, body: Callable[[EngineProcess], Awaitable[None]]
) -> list[Command]:
    async def run() -> list[Command]:
        launcher = Keeping(host.thawed if isinstance(host, Frozen) else None)
        settings = EngineSettings("guest", model, folder, folder / "log")
        process = EngineProcess(settings, launcher, WaitBoard(), host)
        if host is not None:
            host.process = process
        starting = asyncio.create_task(process.start(0))
        waiting = asyncio.create_task(launcher.launched.wait())
        await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if starting.done():
            await starting
        await body(process)
        await asyncio.wait_for(process.wait_dead(), DEADLINE_S)
        await asyncio.gather(starting, return_exceptions=True)
        return launcher.commands

    return asyncio.run(run())


def waits_of(process: EngineProcess) -> set[tuple[str, str]]:
    return {(wait.what, wait.whom) for wait in process._waits.snapshot()}


async def killed(process: EngineProcess) -> None:
    process.kill()
    process.kill()  # once more changes nothing


def test_a_guest_is_started_with_its_hosts_words_and_released_while_it_lives(tmp_path: Path, tiny_model: Path) -> None:
    host = Host()
    (command,) = ending(tmp_path, tiny_model, host, killed)
    assert command.env["HOSTED"] == "yes"
    assert command.env["HOME"] is None
    assert host.told[0] == ("release", True)
    assert [what for what, _ in host.told] == ["release", "thaw"]


def test_a_guest_that_cannot_be_released_is_killed_all_the_same(tmp_path: Path, tiny_model: Path) -> None:
    host = Host()

    async def body(process: EngineProcess) -> None:
        host.trouble = "the device does not let go"
        process.kill()

    ending(tmp_path, tiny_model, host, body)
    assert [what for what, _ in host.told] == ["release", "thaw"]


@pytest.mark.parametrize("error", [psutil.AccessDenied(7), RuntimeError("odd"), OSError(5, "Input/output error")])
def test_whatever_a_release_raises_is_told_and_the_guest_is_killed(
    tmp_path: Path, tiny_model: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Host):
        def release(self, pid: int) -> None:
            self._note("release")
            raise error

    host = Odd()
    ending(tmp_path, tiny_model, host, killed)
    assert [what for what, _ in host.told] == ["release", "thaw"]
    (line,) = (line for line in caplog.messages if "killed without being released" in line)
    assert str(error) in line


def test_a_frozen_guest_whose_thaw_fails_is_thawed_again_until_it_dies(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_process, "_THAW_AGAIN_S", 0.01)
    busy = ClusterError("the group is busy")
    host = Frozen(busy, busy, PermissionError(1, "Operation not permitted"))
    ending(tmp_path, tiny_model, host, killed)
    assert [what for what, _ in host.told] == ["release", *["thaw"] * 4]
    told = [line for line in caplog.messages if "cannot be thawed" in line]
    assert len(told) == 2  # each cause once
    assert "the group is busy" in told[0]
    assert "Operation not permitted" in told[1]


def test_an_end_that_never_comes_names_the_thaw_that_failed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_THAW_AGAIN_S", 0.01)
    monkeypatch.setattr(engine_process, "_KILL_TIMEOUT_S", 0.3)
    host = Frozen(*[ClusterError("the group is gone")] * 1000)

    async def body(process: EngineProcess) -> None:
        stopping = asyncio.create_task(process.stop(grace_s=0.0))
        while ("thaw of a guest that is killed", "guest") not in waits_of(process):
            assert not stopping.done()
            await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded, match=r"no engine end after .*cannot be thawed to die: .*group is gone"):
            await stopping
        assert process.alive
        host.failures.clear()  # it is thawed though nobody asks for it any more

    ending(tmp_path, tiny_model, host, body)


def test_a_release_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_RELEASE_TIMEOUT_S", 0.1)
    held = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    class Slow(Host):
        def release(self, pid: int) -> None:
            self._note("release")
            held.wait()

    async def body(process: EngineProcess) -> None:
        process.kill()
        await asyncio.wait_for(process.wait_dead(), DEADLINE_S)
        assert held.poll() is None
        held.communicate(b"\n")

    ending(tmp_path, tiny_model, Slow(), body)


def test_a_guest_is_killed_though_the_one_before_it_is_not_released_yet(tmp_path: Path, tiny_model: Path) -> None:
    released = threading.Event()

    class SlowAtFirst(Host):
        def release(self, pid: int) -> None:
            self._note("release")
            if len(self.told) == 1:
                released.wait(DEADLINE_S)

    host = SlowAtFirst()

    async def body(process: EngineProcess) -> None:
        process.kill()
        while not host.told:
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait_dead(), DEADLINE_S)
        first = process.pid
        starting = asyncio.create_task(process.start(1))
        while process.pid == first:
            await asyncio.sleep(0.01)
        process.kill()
        try:
            await asyncio.wait_for(process.wait_dead(), 3.0)
            assert not released.is_set()
        finally:
            released.set()
            process.kill()
            await asyncio.gather(starting, return_exceptions=True)

    ending(tmp_path, tiny_model, host, body)
    assert [what for what, _ in host.told].count("release") == 2


def test_an_engine_that_is_nobodys_guest_is_killed_at_once(tmp_path: Path, tiny_model: Path) -> None:
    async def body(process: EngineProcess) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        process.kill()

    (command,) = ending(tmp_path, tiny_model, None, body)
    assert "HOSTED" not in command.env


def test_no_guest_starts_while_its_host_forbids_it(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="guest may not be started now: the serving engine is no client"):
        ending(tmp_path, tiny_model, Host("the serving engine is no client"), killed)


def test_a_host_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_HOSTED_TIMEOUT_S", 0.1)
    answers = threading.Event()

    class Silent(Host):
        def guest_env(self) -> dict[str, str | None]:
            answers.wait(DEADLINE_S)
            return {}

    async def run() -> None:
        launcher, waits = Keeping(), WaitBoard()
        process = EngineProcess(
            EngineSettings("guest", tiny_model, tmp_path, tmp_path / "log"), launcher, waits, Silent()
        )
        try:
            with pytest.raises(DeadlineExceeded, match="guest: no leave to start a guest after"):
                await process.start(0)
        finally:
            answers.set()
        assert launcher.commands == []

    asyncio.run(run())


def test_files_that_cannot_be_removed_hide_no_cause(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a start that failed is left where it is; a socket in the way of the next start is named."""
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.suffix in (".page", ".sock"):
            raise OSError(30, "Read-only file system")
        unlink(path, missing_ok)

    class Failing:
        async def launch(self, command: Command) -> Child:
            monkeypatch.setattr(Path, "unlink", refused)
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "exit(3)", start_new_session=True)
            return SpawnedChild(process)

    async def run() -> None:
        process = EngineProcess(EngineSettings("guest", tiny_model, tmp_path, tmp_path / "log"), Failing(), WaitBoard())
        with pytest.raises(EngineError, match="ended with code 3 while starting"):
            await process.start(0)
        with pytest.raises(ClusterError, match=r"socket .*guest\.sock cannot be removed: Read-only file system"):
            await process.start(0)

    asyncio.run(run())
