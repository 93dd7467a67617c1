"""The serving engine's model: made on the spot, random, and just large enough that a step costs what it should.

Invariants
- The same seed gives the same files. They are made whole by NumPy, without torch.
- It speaks the warm start's vocabulary, so that the load's made-up prompts are ordinary tokens for it.
- It is there for its load alone: what it says means nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rose.errors import ClusterError

_SPREAD = 0.02
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True, slots=True)
class ServingShape:
    """Qwen3's architecture; the defaults are 7 million parameters.

    Few enough that on a slow core, too, a minute has requests enough to speak of percentiles.
    """

    hidden: int = 384
    intermediate: int = 1024
    layers: int = 4
    heads: int = 6
    kv_heads: int = 3
    head_size: int = 64
    context_tokens: int = 1024


def warm_start() -> Path:
    """The folder of the demo's own checkpoint."""
    return Path(str(files("rose.demo") / "warmstart" / "model"))


def make_serving_model(folder: Path, shape: ServingShape | None = None, seed: int = 0) -> Path:
    """Write a model folder that is not there yet. Raises ClusterError if the disk does not take it."""
    shape = shape or ServingShape()
    try:
        folder.mkdir(parents=True)
        for name in _TOKENIZER:
            shutil.copyfile(warm_start() / name, folder / name)
        config = _config(shape)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_file(dict(_tensors(shape, config["vocab_size"], seed)), folder / "model.safetensors", {"format": "pt"})
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"{folder}: the serving engine's model cannot be written: {why}",
            to_do="free some space, or set ROSE_RUNTIME_DIR to a folder with room",
        ) from error
    return folder


def _config(shape: ServingShape) -> dict[str, object]:
    config = json.loads((warm_start() / "config.json").read_text(encoding="utf-8"))
    return {
        **config,
        "dtype": "float16",
        "head_dim": shape.head_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": shape.context_tokens,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
    }


def _tensors(shape: ServingShape, vocabulary: object, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """By the names that a checkpoint of this architecture has."""
    assert isinstance(vocabulary, int)
    random = np.random.default_rng(seed)
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def drawn(*size: int) -> np.ndarray:
        return (_SPREAD * random.standard_normal(size, dtype=np.float32)).astype(np.float16)

    yield "model.embed_tokens.weight", drawn(vocabulary, shape.hidden)
    yield "model.norm.weight", np.ones(shape.hidden, np.float16)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", np.ones(shape.hidden, np.float16)
        yield f"{layer}.post_attention_layernorm.weight", np.ones(shape.hidden, np.float16)
        yield f"{layer}.self_attn.q_norm.weight", np.ones(shape.head_size, np.float16)
        yield f"{layer}.self_attn.k_norm.weight", np.ones(shape.head_size, np.float16)
        yield f"{layer}.self_attn.q_proj.weight", drawn(queries, shape.hidden)
        yield f"{layer}.self_attn.k_proj.weight", drawn(keys, shape.hidden)
        yield f"{layer}.self_attn.v_proj.weight", drawn(keys, shape.hidden)
        yield f"{layer}.self_attn.o_proj.weight", drawn(shape.hidden, queries)
        yield f"{layer}.mlp.gate_proj.weight", drawn(shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.up_proj.weight", drawn(shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", drawn(shape.hidden, shape.intermediate)
