"""Weight files and configs that no loader would take, told from headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.model_folder.families import expected_shapes, with_defaults
from rose.model_folder.folder import read_model_folder
from rose.model_folder.safetensors_header import read_shapes

SHIPPED = Path(__file__).parents[2] / "rose" / "demo" / "warmstart" / "model"
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
}


def file_of(header: object, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(begin: int, end: int, shape: object = None, dtype: str = "BF16") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 2] if shape is None else shape, "data_offsets": [begin, end]}


def test_shapes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(file_of({"__metadata__": {}, "b": entry(4, 10, [3]), "a": entry(0, 4, [], "F32")}, 10))
    assert read_shapes(file) == {"a": (), "b": (3,)}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "too few"),
        (b"\1\0\0", "too few"),
        (file_of({"a": entry(0, 4)}, 4)[:20], "too few"),
        ((1 << 62).to_bytes(8, "little") + bytes(64), "too few"),
        (file_of({"a": entry(0, 4)}, 3), "3 bytes of tensors, its header announces 4"),
        (file_of({"a": entry(0, 4)}, 5), "5 bytes of tensors"),
        (file_of(b"{", 0), "no JSON object"),
        (file_of(b"[]", 0), "no JSON object"),
        (file_of(b"\xff", 0), "no JSON object"),
        (file_of(b"[" * 100_000, 0), "no JSON object"),
        (file_of({"a": entry(0, 4), "b": entry(2, 6)}, 6), "overlap or leave a gap"),
        (file_of({"a": entry(2, 6)}, 6), "overlap or leave a gap"),
        (file_of({"a": entry(0, 4, [3])}, 4), "'a' does not fit together"),
        (file_of({"a": entry(0, 4, [-1, -2])}, 4), "does not fit together"),
        (file_of({"a": entry(0, 4, [True, 2])}, 4), "does not fit together"),
        (file_of({"a": entry(0, 4, dtype="X9")}, 4), "does not fit together"),
        (file_of({"a": 4}, 4), "does not fit together"),
    ],
)
def test_a_file_that_is_cut_or_contradicts_itself(tmp_path: Path, raw: bytes, said: str) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=said):
        read_shapes(file)


WHOLE = file_of({"__metadata__": {"format": "pt"}, "a": entry(0, 4), "b": entry(4, 12, [2, 2])}, 12)


@settings(derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE)), st.binary(max_size=12))
def test_any_damage_is_refused_or_leaves_the_shapes_readable(
    tmp_path: Path, begin: int, end: int, instead: bytes
) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(WHOLE[:begin] + instead + WHOLE[end:])
    try:
        shapes = read_shapes(file)
    except ConfigError:
        return
    assert all(type(size) is int for shape in shapes.values() for size in shape)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for length in range(len(WHOLE)):
        file.write_bytes(WHOLE[:length])
        with pytest.raises(ConfigError):
            read_shapes(file)


@pytest.fixture
def family_folder(tmp_path: Path) -> Callable[..., Path]:
    """A model folder of one family; its weights are those of `weights_of`, where that is another config."""

    def made(family: str, *, weights_of: dict[str, Any] | None = None, **keys: Any) -> Path:
        config = SIZES | {"model_type": family} | keys
        shapes = expected_shapes(with_defaults(config | (weights_of or {})))
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = entry(begin, end, list(shape))
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(file_of(header, end))
        return tmp_path

    return made


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_fit_their_config(family_folder: Callable[..., Path], family: str, tied: bool) -> None:
    assert read_model_folder(family_folder(family, tie_word_embeddings=tied)).unchecked == ""


def test_the_shipped_model_fits() -> None:
    assert read_model_folder(SHIPPED).unchecked == ""


def test_a_tied_model_may_hold_its_head_all_the_same(family_folder: Callable[..., Path]) -> None:
    folder = family_folder("qwen3", tie_word_embeddings=True, weights_of={"tie_word_embeddings": False})
    assert read_model_folder(folder).unchecked == ""


@pytest.mark.parametrize(
    ("family", "keys", "weights_of", "said"),
    [
        ("qwen3", {"num_hidden_layers": 3}, {"num_hidden_layers": 2}, r"lack: model.layers.2.* and \d+ more"),
        ("qwen3", {"num_hidden_layers": 1}, {"num_hidden_layers": 2}, "more layers than config.json's 1"),
        ("qwen3", {}, {"tie_word_embeddings": True}, "lack: lm_head.weight"),
        ("qwen3", {}, {"model_type": "llama", "head_dim": 128}, "lack: .*q_norm"),
        ("qwen2", {}, {"model_type": "llama"}, "lack: .*q_proj.bias"),
        ("llama", {"attention_bias": True}, {"attention_bias": False}, "lack: .*q_proj.bias, .* and 5 more"),
        ("llama", {"mlp_bias": True}, {"mlp_bias": False}, "lack: .*gate_proj.bias"),
        ("qwen3", {"head_dim": 4}, {"head_dim": 2}, r"other shapes .*q_proj.weight \[8, 8\], not \[16, 8\]"),
        ("qwen3", {"vocab_size": 17}, {"vocab_size": 16}, r"embed_tokens.weight \[16, 8\], not \[17, 8\]"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, None, "architectures = "),
        ("qwen3", {"intermediate_size": None}, {"intermediate_size": 4}, "intermediate_size = None"),
    ],
)
def test_a_config_of_another_model(
    family_folder: Callable[..., Path],
    family: str,
    keys: dict[str, Any],
    weights_of: dict[str, Any] | None,
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_model_folder(family_folder(family, weights_of=weights_of, **keys))


def test_what_is_not_checked_is_said(family_folder: Callable[..., Path]) -> None:
    quantized = family_folder("qwen3", weights_of={"hidden_size": 12}, quantization_config={"bits": 4})
    assert "quantized" in read_model_folder(quantized).unchecked
    other = family_folder("mistral", weights_of={"model_type": "llama"})
    assert "model_type 'mistral' is none of qwen3, qwen2, llama" in read_model_folder(other).unchecked
