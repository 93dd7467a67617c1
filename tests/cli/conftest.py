"""A job on a model folder, a runtime folder of its own, and the command as a user calls it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose.cli import main as command


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


Rose = Callable[..., Ended]


@pytest.fixture
def rose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runtime_dir: Path, tmp_path: Path
) -> Rose:
    """Calls `rose ARGS` in a folder of its own; not for what writes to file descriptors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["rose", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", f"{folder}/rt")
        yield Path(folder) / "rt"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job that passes every check of any machine that can run these tests."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = ["vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size"]
    config = {**dict.fromkeys(sizes, 1), "max_position_embeddings": 1024, "model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    path = tmp_path / "job.toml"
    path.write_text(
        '[run]\nname = "demo"\n[model]\npath = "model"\n[environment]\nkind = "frozen_lake"\n[train]\nthreads = 1\n'
    )
    return path
