"""A job, and a runtime folder of its own for every test that opens a run."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.config import Job, load_job
from rose.waits import WaitBoard

JOB_TOML = """
[run]
name = "demo"

[model]
path = "model"

[environment]
kind = "frozen_lake"
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB_TOML)
    return path


@pytest.fixture
def job(job_file: Path) -> Job:
    return load_job(job_file)


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Not in `tmp_path`, whose length leaves no room for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:
        path = Path(folder) / "rt"
        monkeypatch.setenv("ROSE_RUNTIME_DIR", str(path))
        yield path


@pytest.fixture
def waits() -> WaitBoard:
    return WaitBoard()


def safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A file of two-byte zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a model of a family whose tensors are not known."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "mistral",
        "vocab_size": 384,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors({"w": [1000]}))
    return folder
