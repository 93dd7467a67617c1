"""The tensors that a decoder of a known family has, told from its config alone.

Names and shapes are those of the Hugging Face classes `Qwen3ForCausalLM`, `Qwen2ForCausalLM`, `LlamaForCausalLM`,
whose defaults for absent keys differ. Sizes in shapes: vocabulary V, hidden H, heads N, key-value heads K, head
width D, intermediate I.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.model_folder.safetensors_header import Shape

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
"""The class of each `model_type` whose tensors are known here."""

_SHOWN = 3


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the heads that its family takes where it names none. `num_attention_heads` must be there."""
    family, heads = config.get("model_type"), config["num_attention_heads"]
    full = dict(config)
    if family in ("qwen3", "qwen2"):
        full.setdefault("num_key_value_heads", 32)
    if family == "qwen3":
        full.setdefault("head_dim", 128)
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None:
        full["head_dim"] = config["hidden_size"] // heads
    return full


def expected_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of a config `with_defaults` whose `model_type` is in FAMILIES and whose sizes were checked."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    layer = _layer(config)
    for index in range(config["num_hidden_layers"]):
        shapes.update((f"model.layers.{index}.{name}", shape) for name, shape in layer.items())
    return shapes


def _layer(config: Mapping[str, Any]) -> dict[str, Shape]:
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    output = {"o_proj": (hidden, queries)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    with_bias = bool(config.get("attention_bias", False))
    layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= _linears("self_attn", attention, bias=with_bias or family == "qwen2")
    layer |= _linears("self_attn", output, bias=with_bias and family != "qwen2")
    layer |= _linears("mlp", mlp, bias=family == "llama" and bool(config.get("mlp_bias", False)))
    if family == "qwen3":
        layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config["head_dim"],))
    return layer


def _linears(place: str, shapes: Mapping[str, tuple[int, int]], *, bias: bool) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"{place}.{name}.weight": shape for name, shape in shapes.items()}
    if bias:
        found |= {f"{place}.{name}.bias": shape[:1] for name, shape in shapes.items()}
    return found


def disagreement(config: Mapping[str, Any], found: Mapping[str, Shape]) -> str:
    """In what the tensors `found` are not those of the config, in a few words; empty where they are.

    Tensors beyond the config's count only where they belong to a layer that it does not have.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        return f"config.json implies tensors that the weights lack: {_some(missing)}"
    other = [
        f"{name} {list(found[name])}, not {list(shape)}" for name, shape in expected.items() if found[name] != shape
    ]
    if other:
        return f"the weights have other shapes than config.json implies: {_some(other)}"
    layers = config["num_hidden_layers"]
    beyond = [name for name in found if (index := _layer_index(name)) is not None and index >= layers]
    return f"the weights have more layers than config.json's {layers}: {_some(beyond)}" if beyond else ""


def _layer_index(name: str) -> int | None:
    parts = name.split(".", 3)
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdecimal() else None


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
