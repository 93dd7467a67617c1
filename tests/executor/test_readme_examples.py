"""Every example of the transfer's documents runs as it is printed, but for addresses, paces and the size of an engine.

What an example needs that is not in its file is what the text around it names: the token, a model folder, an engine.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_transfer.store import StoreReader
from rose_transfer.store.buckets import unpack

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "transfer" / "README.md", ROOT / "docs" / "weights.md")
PYTHON = re.compile(r"```python\n(# (\S+\.py)\n.*?)```", re.DOTALL)
RELAY = re.compile(r"^rose (relay .*)$", re.MULTILINE)
DEADLINE_S = 200.0

pytestmark = pytest.mark.timeout(300)


def examples() -> dict[str, str]:
    """The text of each example, by the name of its file."""
    return {name: text for document in DOCUMENTS for text, name in PYTHON.findall(document.read_text("utf-8"))}


class Folder:
    """Where somebody tries the examples, with the token that all of them share."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self._ports = {"7070": str(port), "7071": str(port + 1)}
        self._running: list[subprocess.Popen[bytes]] = []
        (path / "token").write_text("0123456789abcdef" * 4)

    def run(self, name: str, change: Callable[[str], str] = lambda text: text, **env: str) -> Path:
        """Start an example, after a `change`. Returns where its output goes."""
        (self.path / name).write_text(self._placed(change(examples()[name])))
        return self.start(name, [sys.executable, name], **env)

    def start(self, name: str, command: list[str], **env: str) -> Path:
        output = self.path / f"{name}.out"
        with output.open("ab") as log:
            self._running.append(
                subprocess.Popen(
                    [self._placed(word) for word in command],
                    cwd=self.path,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                    stdout=log,
                    stderr=log,
                )
            )
        return output

    def says(self, output: Path, words: str) -> None:
        """Wait until that is in the output of what was started last."""
        until = time.monotonic() + DEADLINE_S
        while words not in output.read_text("utf-8", "replace"):
            ended = self._running[-1].poll() not in (None, 0)
            assert not ended, output.read_text("utf-8", "replace")[-4000:]
            assert time.monotonic() < until, output.read_text("utf-8", "replace")[-4000:]
            time.sleep(0.05)

    def ends(self, output: Path) -> str:
        """What it said that was started last, once it has ended well."""
        assert self._running[-1].wait(DEADLINE_S) == 0, output.read_text("utf-8", "replace")[-4000:]
        return output.read_text("utf-8", "replace")

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _placed(self, text: str) -> str:
        for shown, used in self._ports.items():
            text = text.replace(shown, used)
        return text


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


def of_model(text: str) -> str:
    """The trainer has the engine's model, as the text says, and waits after its first version."""
    text = text.replace("torch.nn.Linear(512, 512)", 'AutoModelForCausalLM.from_pretrained("model", dtype="bfloat16")')
    return text.replace("import torch\n", "import torch\nfrom transformers import AutoModelForCausalLM\n", 1)


def patient(text: str) -> str:
    return text.replace("asyncio.sleep(3)", "asyncio.sleep(3600)")


def test_every_example_is_a_file_that_some_test_here_runs() -> None:
    printed = sum(document.read_text("utf-8").count("```python") for document in DOCUMENTS)
    known = {"trainer.py", "reader.py", "follow.py", "layouts.py", "ranks.py", "vllm_update.py", "store.py", "rdma.py"}
    assert (printed, set(examples())) == (len(known), known)


def test_a_trainer_and_readers_one_of_them_behind_a_relay(folder: Folder) -> None:
    (relay,) = RELAY.findall(DOCUMENTS[0].read_text("utf-8"))
    trainer = folder.run("trainer.py")
    relayed = folder.start("relay", [sys.executable, "-m", "rose.cli.main", *relay.split()])
    folder.says(relayed, "relaying 127.0.0.1")
    reader = folder.run("reader.py", lambda text: text.replace("7070", "7071"))
    folder.says(reader, "version ")
    (folder.path / "incoming").rename(folder.path / "incoming-of-the-first")
    direct = folder.run("reader.py")
    folder.says(direct, "version ")
    assert trainer.read_text("utf-8") == ""


def test_a_store_that_is_taken_over_by_another(folder: Folder) -> None:
    assert folder.ends(folder.run("store.py")) == "(5, 7, 8) (5, 8)\n"
    for name, version in (("store", 7), ("other", 8)):
        store = StoreReader(folder.path / name)
        assert set(unpack(store.packing(version), store.read(version))) == {"bias", "weight"}


def test_weights_by_rdma(folder: Folder) -> None:
    pytest.importorskip("nixl")
    assert "version 1: " in folder.ends(folder.run("rdma.py"))


def test_a_trainer_of_two_ranks(folder: Folder) -> None:
    """Started as torchrun does it."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    for rank in "01":
        ended = folder.run("ranks.py", RANK=rank, LOCAL_RANK=rank, **world)
    folder.ends(ended)
    store = StoreReader(folder.path / "of-ranks")
    assert store.versions() == (1, 2, 3)
    assert set(unpack(store.packing(3), store.read(3))) == {"bias", "weight"}


@pytest.mark.engine
def test_an_engine_that_follows_its_trainer(fresh_rig: Any, folder: Folder) -> None:
    """The engine is the one that the tests share; its socket is elsewhere."""
    (folder.path / "model").symlink_to(fresh_rig.model)
    control = str(fresh_rig.engine.settings.control_socket)
    follower = folder.run("follow.py", lambda text: text.replace("engine-0.sock", control))
    layouts = folder.path / "layouts.json"
    until = time.monotonic() + DEADLINE_S
    while not layouts.exists() and time.monotonic() < until:
        time.sleep(0.05)
    (folder.path / "layouts.py").write_text(examples()["layouts.py"])
    trainer = folder.run(
        "trainer.py",
        lambda text: (
            of_model(text)
            .replace("import torch\n", "import torch\nfrom layouts import layouts\n", 1)
            .replace("serve=serve)", "receivers=layouts, serve=serve)")
        ),
    )
    folder.says(follower, "Followed(version=2,")
    assert trainer.exists()
    assert fresh_rig.engine.page.version >= 2


@pytest.mark.engine
def test_vllm_s_own_interface(folder: Folder, tiny_model: Path) -> None:
    """Without the shared engine: who uses this makes an engine of vLLM's own."""
    (folder.path / "model").symlink_to(tiny_model)
    folder.run("trainer.py", lambda text: patient(of_model(text)))
    small = "enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=2**24"
    updated = folder.run("vllm_update.py", lambda text: text.replace('LLM("model", ', f'LLM("model", {small}, '))
    assert folder.ends(updated).splitlines()[-1] == "version 1"
