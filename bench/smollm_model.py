"""SmolLM2-135M-Instruct as a torch model, with its tokenizer: what its 4-bit file stands for, in float32."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from bench.smollm_package import FILE, cache_folder

HEADS, KV_HEADS = 9, 3
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load() -> tuple[LlamaForCausalLM, Tokenizer]:
    """Embeddings are tied. `smollm_package.missing` must have said that it can be had."""
    gguf = _gguf()
    reader = gguf.GGUFReader(str(cache_folder() / FILE))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_weights(gguf, reader))
    return model, _tokenizer(reader)


def _gguf() -> Any:
    """The module, which is only there once `smollm_package` has installed it."""
    sys.path.append(str(cache_folder()))
    return importlib.import_module("gguf")


def _weights(gguf: Any, reader: Any) -> dict[str, torch.Tensor]:
    """By the names of Hugging Face's Llama."""
    found: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if tensor.name == "token_embd.weight":
            found["model.embed_tokens.weight"] = found["lm_head.weight"] = value
        elif tensor.name == "output_norm.weight":
            found["model.norm.weight"] = value
        else:
            _, layer, name, _ = tensor.name.split(".")
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            found[f"model.layers.{layer}.{_NAMES[name]}.weight"] = _halves(value, heads) if heads else value
    return found


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in halves, as Hugging Face rotates them; the file has them in pairs."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(reader: Any) -> Tokenizer:
    def value(field: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{field}"].contents()

    vocabulary = {token: number for number, token in enumerate(value("tokens"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in value("merges")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
