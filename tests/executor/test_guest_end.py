"""How a guest's processes are ended: released by its host first, killed in any case, thawed to die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rose.errors import ClusterError, EngineError
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


class Keeping:
    """A launcher whose engines say what they were started with, and never answer."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.launched = asyncio.Event()

    async def launch(self, command: Command) -> Child:
        self.commands.append(command)
        sleeps = "import time; time.sleep(600)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", sleeps, start_new_session=True)
        self.launched.set()
        return SpawnedChild(process)


def ending(
    folder: Path, model: Path, host: Host | None, body: Callable[[EngineProcess], Awaitable[None]]
) -> list[Command]:
    async def run() -> list[Command]:
        launcher = Keeping()
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


def test_an_engine_that_is_nobodys_guest_is_killed_at_once(tmp_path: Path, tiny_model: Path) -> None:
    async def body(process: EngineProcess) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        process.kill()

    (command,) = ending(tmp_path, tiny_model, None, body)
    assert "HOSTED" not in command.env


def test_no_guest_starts_while_its_host_forbids_it(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="guest may not be started now: the serving engine is no client"):
        ending(tmp_path, tiny_model, Host("the serving engine is no client"), killed)
