"""Every example of the transfer's documents runs as it is printed, but for addresses, paces and the size of an engine.

What an example needs that is not in its file is what the text around it names: the token, a model folder, an engine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rose.errors import EngineError, TransferError
from rose_executor.control_client import ControlClient, EngineDescription
from rose_executor.launcher import Command
from rose_transfer.store import StoreReader
from rose_transfer.store.buckets import unpack

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(ROOT / name for name in ("transfer/README.md", "docs/weights.md", "executor/README.md"))
PYTHON = re.compile(r"```python\n(# (\S+\.py)\n.*?)```", re.DOTALL)
RELAY = re.compile(r"^rose (relay .*)$", re.MULTILINE)
DEADLINE_S = 250.0

pytestmark = pytest.mark.timeout(600)


def examples() -> dict[str, str]:
    """The text of each example, by the name of its file."""
    return {name: text for document in DOCUMENTS for text, name in PYTHON.findall(document.read_text("utf-8"))}


@dataclass(frozen=True)
class Started:
    """A process, and the file that all its output goes to."""

    process: subprocess.Popen[bytes]
    output: Path

    def said(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def says(self, words: str) -> None:
        """Wait until it has said something that matches."""
        self._until(lambda: re.search(words, self.said()) is not None)
        assert self.process.poll() in (None, 0), self.said()[-4000:]

    def ends(self) -> str:
        """What it said, once it has ended well."""
        self._until(lambda: self.process.poll() is not None)
        assert self.process.returncode == 0, self.said()[-4000:]
        return self.said()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not holds() and self.process.poll() is None:
            assert time.monotonic() < until, self.said()[-4000:]
            time.sleep(0.05)
        assert holds(), self.said()[-4000:]


class Folder:
    """Where somebody tries the examples, with the token that all of them share."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self._ports = {"7070": str(port), "7071": str(port + 1)}
        self._started: list[Started] = []
        (path / "token").write_text("0123456789abcdef" * 4)

    def run(self, name: str, change: Callable[[str], str] = lambda text: text, **env: str) -> Started:
        """Start an example, after a `change`."""
        self.write(name, change)
        return self.start(sys.executable, name, **env)

    def write(self, name: str, change: Callable[[str], str]) -> None:
        text = self._placed(change(examples()[name]))
        file = self.path / name
        if not file.exists() or file.read_text() != text:  # another process may be reading it
            file.write_text(text)

    def start(self, *command: str, **env: str) -> Started:
        output = self.path / f"{len(self._started)}.out"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [self._placed(word) for word in command],
                cwd=self.path,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                stdout=log,
                stderr=log,
            )
        self._started.append(Started(process, output))
        return self._started[-1]

    def until_published(self, name: str, version: int) -> None:
        until = time.monotonic() + DEADLINE_S
        while version not in versions(self.path / name):
            assert time.monotonic() < until, [started.said()[-4000:] for started in self._started]
            time.sleep(0.05)

    def close(self) -> None:
        for started in self._started:
            started.stop()

    def _placed(self, text: str) -> str:
        for shown, used in self._ports.items():
            text = text.replace(shown, used)
        return text


def versions(store: Path) -> tuple[int, ...]:
    """() also as long as there is none."""
    try:
        return StoreReader(store).versions()
    except (OSError, TransferError):
        return ()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path, free_ports())
    yield made
    made.close()


def free_ports() -> int:
    """The first of two free ports in a row."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


MODEL = """from safetensors.torch import load_file


class Model:
    def __init__(self):
        self.weights = load_file("model/model.safetensors")

    def parameters(self):
        return self.weights.values()

    def state_dict(self):
        return self.weights
"""


def of_model(text: str) -> str:
    """The trainer has the weights of the engine's model, without the half minute in which transformers loads one."""
    text = text.replace("torch.nn.Linear(512, 512)", "Model()")
    return text.replace("import torch\n", f"import torch\n{MODEL}", 1)


def for_receivers(text: str) -> str:
    text = text.replace("import torch\n", "import torch\nfrom layouts import layouts\n", 1)
    return text.replace("serve=serve)", "receivers=layouts, serve=serve)")


def patient(text: str) -> str:
    """One version is enough: it is still kept when an engine has started at last."""
    return text.replace("asyncio.sleep(3)", "asyncio.sleep(3600)")


def test_every_example_is_a_file_that_some_test_here_runs() -> None:
    printed = sum(document.read_text("utf-8").count("```python") for document in DOCUMENTS)
    near = {"trainer.py", "reader.py", "follow.py", "layouts.py", "ranks.py", "vllm_update.py"}
    known = near | {"store.py", "rdma.py", "engine.py"}
    assert (printed, set(examples())) == (len(known), known)


def test_a_trainer_and_a_reader_near_it_then_behind_a_relay(folder: Folder) -> None:
    (relay,) = RELAY.findall(DOCUMENTS[0].read_text("utf-8"))
    folder.run("trainer.py")
    near = folder.run("reader.py")
    near.says(r"version \d+: \d+ bytes\n(.*\n)*version \d+: \d+ bytes\n")
    whole, *deltas = map(int, re.findall(r"version \d+: (\d+) bytes", near.said()))
    assert max(deltas) < whole / 10
    near.stop()
    folder.start(sys.executable, "-m", "rose.cli.main", *relay.split()).says("relaying 127.0.0.1")
    folder.run("reader.py", lambda text: text.replace("7070", "7071")).says("version ")


def test_a_store_that_is_taken_over_by_another(folder: Folder) -> None:
    assert folder.run("store.py").ends() == "(5, 7, 8) (5, 8)\n"
    for name, version in (("store", 7), ("other", 8)):
        store = StoreReader(folder.path / name)
        assert set(unpack(store.packing(version), store.read(version))) == {"bias", "weight"}


def test_weights_by_rdma(folder: Folder) -> None:
    if not any(importlib.util.find_spec(package) for package in ("nixl_cu12", "nixl_cu13")):
        pytest.skip("NIXL is not installed")
    assert "version 1: " in folder.run("rdma.py").ends()


def test_a_trainer_of_two_ranks(folder: Folder) -> None:
    """Started as torchrun does it."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    ranks = [folder.run("ranks.py", RANK=rank, LOCAL_RANK=rank, **world) for rank in "01"]
    for rank in ranks:
        rank.ends()
    store = StoreReader(folder.path / "of-ranks")
    assert store.versions() == (1, 2, 3)
    assert set(unpack(store.packing(3), store.read(3))) == {"bias", "weight"}


@pytest.mark.engine
def test_an_engine_that_follows_its_trainer(fresh_rig: Any, folder: Folder) -> None:
    """The engine is the one that the tests share; its socket is elsewhere."""
    (folder.path / "model").symlink_to(fresh_rig.model)
    control = str(fresh_rig.engine.settings.control_socket)
    follower = folder.run("follow.py", lambda text: text.replace("engine-0.sock", control))
    until = time.monotonic() + DEADLINE_S
    while not (folder.path / "layouts.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    folder.run("layouts.py").ends()
    folder.run("trainer.py", lambda text: for_receivers(of_model(text)))
    follower.says(r"Followed\(version=\d+.*\n(.*\n)*Followed\(version=\d+")
    assert fresh_rig.engine.page.version >= 2


@pytest.mark.engine
def test_vllm_s_own_interface(rig: Any, folder: Folder) -> None:
    """In a fork of the process that has imported vLLM, where cProfile is what runs a file."""
    (folder.path / "model").symlink_to(rig.model)
    folder.run("trainer.py", lambda text: patient(of_model(text)))
    folder.until_published("weights", 1)
    small = "enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=2**24"
    folder.write("vllm_update.py", lambda text: text.replace('LLM("model", ', f'LLM("model", {small}, '))
    log = folder.path / "vllm.log"
    command = Command("cProfile", ("-o", os.devnull, "vllm_update.py"), log, folder.path)
    child = rig.run(rig.warm.launch(command))
    assert rig.run(asyncio.wait_for(child.wait(), DEADLINE_S)) == 0, log.read_text()[-4000:]
    assert "version 1\n" in log.read_text()


@pytest.mark.engine
def test_an_engine_is_started(rig: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the warm process that the tests share, which stays; and from within the event loop that it is of."""
    (folder.path / "model").symlink_to(rig.model)
    monkeypatch.chdir(folder.path)
    text = examples()["engine.py"]
    for own, shared in (
        ('await WarmProcess.start(waits, log_path=here / "warm.log")', "warm"),
        ("await launcher.close()", "pass"),
        ("asyncio.run(serve())", ""),
    ):
        assert own in text
        text = text.replace(own, shared)
    names: dict[str, Any] = {"warm": rig.warm}
    exec(text, names)

    async def describe() -> EngineDescription:
        serving = asyncio.create_task(names["serve"]())
        control = ControlClient(folder.path / "engine-0.sock", engine_id="engine-0", waits=rig.waits)
        try:
            while True:
                with suppress(EngineError):
                    return await control.describe()
                assert not serving.done(), serving
                await asyncio.sleep(0.1)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            await control.close()

    described = rig.run(describe())
    assert (described.engine_id, described.weight_version) == ("engine-0", 0)
