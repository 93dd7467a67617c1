"""What a model folder in Hugging Face format says about itself, read without loading it.

Read are config.json and the headers of the weight files: enough to tell a folder that no loader would take, in
milliseconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.model_folder.families import FAMILIES, disagreement, with_defaults
from rose.model_folder.safetensors_header import Shape, read_shapes

CONFIG_BYTES_MAX = 1 << 24
LAYERS_MAX = 10_000
_SIZE_MAX = 2**31 - 1
_TO_DO = "name a folder in Hugging Face format, with config.json, tokenizer.json and *.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Sizes of a model; `kv_values_per_token` counts keys and values over all layers.

    `unchecked` says why the tensors were not held against the config; it is empty where they were, and fit.
    """

    weights_bytes: int
    vocab_size: int
    context_tokens_max: int
    kv_values_per_token: int
    unchecked: str


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ConfigError that names what is missing or wrong in the folder."""
    # os.path takes a path that cannot even be looked at for one that is not there, where Path raises.
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: {'not a folder' if os.path.exists(path) else 'no such folder'}", to_do=_TO_DO)
    config = _config(path / "config.json")
    files = [file for file in path.glob("*.safetensors") if os.path.isfile(file)]
    if not files:
        raise ConfigError(f"{path}: no *.safetensors in it", to_do=_TO_DO)
    if not os.path.isfile(path / "tokenizer.json"):
        raise ConfigError(f"{path}: no tokenizer.json in it", to_do=_TO_DO)
    heads = _size(path, config, "num_attention_heads")
    _size(path, config, "hidden_size", least=heads)
    layers = _size(path, config, "num_hidden_layers", most=LAYERS_MAX)
    context_tokens_max = _size(path, config, "max_position_embeddings")
    vocab_size = _size(path, config, "vocab_size")
    config = with_defaults(config)
    kv_heads, head_dim = _size(path, config, "num_key_value_heads"), _size(path, config, "head_dim")
    shapes: dict[str, Shape] = {}
    for file in sorted(files):
        shapes |= read_shapes(file)
    return ModelFolder(
        weights_bytes=sum(file.stat().st_size for file in files),
        vocab_size=vocab_size,
        context_tokens_max=context_tokens_max,
        kv_values_per_token=2 * layers * kv_heads * head_dim,
        unchecked=_hold_against(path, config, shapes),
    )


def _hold_against(path: Path, config: dict[str, Any], shapes: dict[str, Shape]) -> str:
    """Why the tensors cannot be held against the config. Raises ConfigError if they can be, and do not fit."""
    family, file = config.get("model_type"), path / "config.json"
    if not isinstance(family, str) or _is_known(family) is False:
        raise ConfigError(
            f"{file}: model_type = {str(family)[:80]!r}", expected="one that transformers knows", to_do=_TO_DO
        )
    if family not in FAMILIES:
        return f"its tensors are not checked: model_type {family[:80]!r} is none of {', '.join(FAMILIES)}"
    if config.get("quantization_config"):
        return "its tensors are not checked: they are quantized"
    classes = config.get("architectures") or [FAMILIES[family]]
    if classes != [FAMILIES[family]]:
        raise ConfigError(f"{file}: architectures = {str(classes)[:80]}", expected=FAMILIES[family], to_do=_TO_DO)
    _size(path, config, "intermediate_size")
    wrong = disagreement(config, shapes)
    if wrong:
        raise ConfigError(f"{path}: {wrong}", to_do="give config.json and *.safetensors of one model")
    return ""


def _is_known(family: str) -> bool | None:
    """Whether transformers names the `model_type` in the list of its own; None where there is no such list.

    Importing the library to ask it would cost seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    try:
        mappings = (Path(spec.origin).parent / "models/auto/auto_mappings.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return f'"{family}"' in mappings


def _config(path: Path) -> dict[str, Any]:
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe could wait for ever
        raise ConfigError(f"{path}: not a regular file", to_do=_TO_DO)
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", to_do=_TO_DO) from None
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {CONFIG_BYTES_MAX} bytes", to_do=_TO_DO)
    try:
        config = json.loads(raw)
    except RecursionError:
        raise ConfigError(f"{path}: not JSON: nested too deeply", to_do=_TO_DO) from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", to_do=_TO_DO) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds no JSON object", to_do=_TO_DO)
    return config


def _size(path: Path, config: dict[str, Any], key: str, *, least: int = 1, most: int = _SIZE_MAX) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{path / 'config.json'}: {key} = {repr(value)[:80]}",
            expected=f"a whole number from {least} to {most}",
            to_do=_TO_DO,
        )
    return value
