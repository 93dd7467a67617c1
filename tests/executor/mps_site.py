"""A place with an MPS daemon and programs that are its clients: NVIDIA's own on a GPU, stand-ins elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from process_tools import until

from rose_executor.mps_words import PIPE_DIRECTORY

HERE = Path(__file__).parent
_TOOL = "nvidia-cuda-mps-control"


class Working:
    """A process that computes."""

    def __init__(self, process: subprocess.Popen[bytes], beats: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._beats = beats

    def beats(self) -> int:
        return self._beats.stat().st_size if self._beats.exists() else 0

    def goes_on(self) -> None:
        """It still computes from now on."""
        before = self.beats()
        until(lambda: self.beats() > before, "it computes no more")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class MpsSite:
    """`directory` has the daemon's pipes; `module` is what a client runs."""

    def __init__(self, protocol: int, directory: Path, module: str) -> None:
        self.protocol = protocol
        self.directory = directory
        self.module = module
        self._folder = directory.parent
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, env: Mapping[str, str | None] | None = None) -> Working:
        """A program whose environment is this process's, changed by `env`; it computes when this returns."""
        beats = self._folder / name
        working = Working(self.run(str(HERE / f"{self.module}.py"), str(beats), env=env), beats)
        until(working.beats, "it does not begin to compute")
        return working

    def run(self, *arguments: str, env: Mapping[str, str | None] | None = None) -> subprocess.Popen[bytes]:
        merged = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **(env or {})}
        environ = {key: value for key, value in merged.items() if value is not None}
        self._started.append(subprocess.Popen([sys.executable, *arguments], env=environ, start_new_session=True))
        return self._started[-1]

    def end(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def mps_site(kind: str, protocol: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[MpsSite]:
    """A daemon of its own. Skips where the driver has no such daemon."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # short, because sockets lie in it
        directory = Path(folder) / "p"
        monkeypatch.setenv(PIPE_DIRECTORY, str(directory))
        monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(Path(folder) / "l"))
        if kind == "fake":
            _put_on_path(Path(folder) / "bin", monkeypatch)
        elif shutil.which(_TOOL) is None:
            pytest.skip(f"{_TOOL} is not installed")
        directory.mkdir()
        (Path(folder) / "l").mkdir()
        started = subprocess.run([_TOOL, "-d", "-p", str(protocol)] if protocol == 3 else [_TOOL, "-d"], check=False)
        if started.returncode != 0:
            pytest.skip(f"the driver's daemon does not speak v{protocol}")
        site = MpsSite(protocol, directory, "fake_cuda_main" if kind == "fake" else "real_cuda_main")
        try:
            yield site
        finally:
            site.end()
            if kind != "fake":
                subprocess.run([_TOOL, "-q"] if protocol == 3 else [_TOOL], input=b"quit\n", check=False)


def _put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    programs = {
        _TOOL: f'exec {sys.executable} -S -E {HERE / "fake_mps_main.py"} "$@"\n',
        "nvidia-smi": "echo Default\n",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
