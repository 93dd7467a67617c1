"""A small model folder with a tied head, written without transformers so that this room stays fast."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def masters() -> dict[str, torch.Tensor]:
    """float32 master weights; `lm_head.weight` is another name of the embedding."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        "model.embed_tokens.weight": torch.randn(12, 8, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(8, 16, generator=generator),
        "model.norm.weight": torch.ones(8),
    }
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}


@pytest.fixture
def base(tmp_path: Path, masters: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": True}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.md").write_text("not for engines")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in masters.items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there can be one, for tests that flush to disk some thousand times."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="rose-") as folder:
        yield Path(folder)
