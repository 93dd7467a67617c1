"""The model of the live update's bench: a Qwen3 of 151 million random parameters, and versions of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import rose.demo
from rose_transfer.store import Packing, Store
from rose_transfer.store.buckets import pack, state_parameters
from rose_transfer.store.packing import pack_whole

SHARE_CHANGED = 0.01
Weights = dict[str, torch.Tensor]


def build(folder: Path) -> Path:
    """A model folder with the demo's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=20,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(rose.demo.__file__).parent / "warmstart/model" / file, folder / file)
    return folder


def moved(weights: Weights, seed: int) -> Weights:
    """1 % of the elements one step up or down, as training moves most of them."""
    generator = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for name, tensor in weights.items():
        bits = tensor.view(torch.int16)
        # Below zero the bits of a zero would be those of a NaN.
        moves = (torch.rand(bits.shape, generator=generator) < SHARE_CHANGED) & (tensor != 0)
        up = torch.rand(bits.shape, generator=generator) < 0.5
        steps = torch.where(up, 1, -1).to(torch.int16) * moves
        found[name] = (bits + steps).view(torch.bfloat16)
    return found


class Line:
    """Versions of the model in a store, each in steps from the one before; version 0 is the model folder's."""

    def __init__(self, folder: Path, model: Path) -> None:
        from safetensors.torch import load_file

        self.weights: Weights = load_file(model / "model.safetensors")
        self.store = Store(folder, compress=True)
        self._packing: Packing = pack_whole(state_parameters(self.weights))
        self.newest = -1
        self._publish()

    def advance(self) -> list[tuple[str, bool]]:
        """Publish the next version, and return the way to it from the one before."""
        self.weights = moved(self.weights, self.newest + 1)
        self._publish()
        return self.way(self.newest - 1)

    def way(self, start: int | None) -> list[tuple[str, bool]]:
        """The way to the newest version."""
        return [(step.manifest.key, step.backwards) for step in self.store.delta(start, self.newest)]

    def _publish(self) -> None:
        self.store.publish(self.newest + 1, self._packing, pack(self._packing, self.weights), self.store.newest)
        self.newest += 1
