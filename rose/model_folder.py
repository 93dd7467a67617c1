"""What a model folder in Hugging Face format says about itself, read without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

_TO_DO = "set model.path to a folder in Hugging Face format, with config.json, tokenizer.json and *.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Sizes of a model; `kv_values_per_token` counts keys and values over all layers."""

    weights_bytes: int
    vocab_size: int
    context_tokens_max: int
    kv_values_per_token: int


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ConfigError that names what is missing or wrong in the folder."""
    if not path.is_dir():
        raise ConfigError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}", to_do=_TO_DO)
    config = _config(path / "config.json")
    weights = [file.stat().st_size for file in path.glob("*.safetensors") if file.is_file()]
    if not weights:
        raise ConfigError(f"{path}: no *.safetensors in it", to_do=_TO_DO)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path}: no tokenizer.json in it", to_do=_TO_DO)
    heads = _size(path, config, "num_attention_heads")
    kv_heads = _size(path, config, "num_key_value_heads") if "num_key_value_heads" in config else heads
    hidden = _size(path, config, "hidden_size")
    head_dim = _size(path, config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    return ModelFolder(
        weights_bytes=sum(weights),
        vocab_size=_size(path, config, "vocab_size"),
        context_tokens_max=_size(path, config, "max_position_embeddings"),
        kv_values_per_token=2 * _size(path, config, "num_hidden_layers") * kv_heads * head_dim,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", to_do=_TO_DO) from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", to_do=_TO_DO) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds no JSON object", to_do=_TO_DO)
    return config


def _size(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path / 'config.json'}: {key} = {value!r}", expected="a whole number from 1", to_do=_TO_DO)
    return value
