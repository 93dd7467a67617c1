"""Ranks of an engine with the oddities of real ones, and versions of the model that they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, LocalTensor, Pad, Parameter, Piece
from rose_transfer.live import LiveWeights
from rose_transfer.store import Store
from rose_transfer.store.buckets import pack
from rose_transfer.store.packing import pack_for

HIDDEN, VOCAB, PADDED_VOCAB = 96, 1003, 1024
SHAPES: Mapping[str, Parameter] = {
    "embed": Parameter((VOCAB, HIDDEN), "bfloat16"),
    "norm": Parameter((HIDDEN,), "bfloat16"),
    "q": Parameter((HIDDEN, HIDDEN), "bfloat16"),
    "k": Parameter((32, HIDDEN), "bfloat16"),
    "down": Parameter((HIDDEN, 1536), "bfloat16"),
    "gate": Parameter((1536, HIDDEN), "bfloat16"),
    "up": Parameter((1536, HIDDEN), "bfloat16"),
    "mixer": Parameter((HIDDEN, 1024), "bfloat16"),
    "router": Parameter((8, HIDDEN), "float32"),
}


def rank_layout(rank: int = 0, size: int = 1, *, dtype: str = "bfloat16", twice: bool = False) -> Layout:
    """Rank `rank` of `size`: fused and sharded projections, a padded vocabulary, a transposed and a replicated tensor.

    `dtype` is what it holds bfloat16 parameters in; `twice` keeps a second copy of the embedding, as an untied head.
    """
    rows = PADDED_VOCAB // size
    held = max(0, min(rows, VOCAB - rank * rows))
    wide, q_rows = 1536 // size, HIDDEN // size
    tensors = {
        "embed_tokens": LocalTensor((rows, HIDDEN), dtype),
        "norm": LocalTensor((HIDDEN,), dtype),
        "qk": LocalTensor((q_rows + 32, HIDDEN), dtype),
        "down_proj": LocalTensor((HIDDEN, wide), dtype),
        "gate_up": LocalTensor((2 * wide, HIDDEN), dtype),
        "mixer_transposed": LocalTensor((1024, HIDDEN), dtype),
        "router": LocalTensor((8, HIDDEN), "float32"),
    }
    pieces = [
        Piece("embed", Box((rank * rows, 0), (held, HIDDEN)), "embed_tokens", 0, (HIDDEN, 1)),
        Piece("norm", Box((0,), (HIDDEN,)), "norm", 0, (1,)),
        Piece("q", Box((rank * q_rows, 0), (q_rows, HIDDEN)), "qk", 0, (HIDDEN, 1)),
        Piece("k", Box((0, 0), (32, HIDDEN)), "qk", q_rows * HIDDEN, (HIDDEN, 1)),
        Piece("down", Box((0, rank * wide), (HIDDEN, wide)), "down_proj", 0, (wide, 1)),
        Piece("gate", Box((rank * wide, 0), (wide, HIDDEN)), "gate_up", 0, (HIDDEN, 1)),
        Piece("up", Box((rank * wide, 0), (wide, HIDDEN)), "gate_up", wide * HIDDEN, (HIDDEN, 1)),
        Piece("mixer", Box((0, 0), (HIDDEN, 1024)), "mixer_transposed", 0, (1, HIDDEN)),
        Piece("router", Box((0, 0), (8, HIDDEN)), "router", 0, (HIDDEN, 1)),
    ]
    if twice:
        tensors["head"] = tensors["embed_tokens"]
        pieces.append(Piece("embed", pieces[0].box, "head", 0, (HIDDEN, 1)))
    padding = Box((held, 0), (rows - held, HIDDEN))
    pads = [Pad(name, padding) for name in ("embed_tokens", "head") if name in tensors and rows > held]
    return Layout(f"rank {rank} of {size}", SHAPES, tensors, tuple(pieces), tuple(pads))


def first_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(value.shape, generator=generator) * 0.03).to(getattr(torch, value.dtype))
        for name, value in SHAPES.items()
    }


def trained(state: Mapping[str, torch.Tensor], seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    """`share` of the elements one step up or down, and a few made NaNs with payloads, infinities and -0.0."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).clone()
        moves = torch.rand(bits.shape, generator=generator) < share
        bits += moves * (torch.randint(0, 2, bits.shape, generator=generator) * 2 - 1).to(bits.dtype)
        flat = bits.view(-1)
        odd = (0x7FC3, -0x80, 0x7F81, -0x8000, 0x7F80)  # NaNs of two kinds and both signs, -0.0, infinity
        for place, value in enumerate(odd):
            at = int(torch.randint(flat.numel(), (1,), generator=generator))
            flat[at] = value if bits.dtype == torch.int16 else value * 2**16 + place
        found[name] = bits.view(tensor.dtype)
    return found


def memory_for(layout: Layout, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a loader leaves in the local tensors of a rank: by direct slicing; padding is 0."""
    memory = {
        name: torch.zeros(math.prod(value.shape), dtype=getattr(torch, value.dtype))
        for name, value in layout.tensors.items()
    }
    for piece in layout.pieces:
        part = state[piece.parameter][
            tuple(slice(start, end) for start, end in zip(piece.box.starts, piece.box.ends, strict=True))
        ]
        memory[piece.tensor].as_strided(piece.box.sizes, piece.strides, piece.offset).copy_(part)
    return {name: flat.view(layout.tensors[name].shape) for name, flat in memory.items()}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().view(torch.uint8).numpy().tobytes()

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


class Line:
    """Versions 1 to `versions` of one model in a store, each in steps from the one before."""

    def __init__(
        self, folder: Path, layouts: Sequence[Layout], versions: int = 3, *, bucket_bytes: int = 2**20
    ) -> None:
        self.packing = pack_for(layouts, bucket_bytes)
        self.store = Store(folder)
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        for version in range(1, versions + 1):
            self.publish(version, first_state() if version == 1 else trained(self.states[version - 1], version))

    def publish(self, version: int, state: dict[str, torch.Tensor]) -> None:
        self.states[version] = state
        self.store.publish(version, self.packing, pack(self.packing, state), base=self.store.newest)

    def live(self, layout: Layout, version: int) -> tuple[LiveWeights, dict[str, torch.Tensor]]:
        """A rank that runs `version`, and its memory."""
        memory = memory_for(layout, self.states[version])
        return LiveWeights(layout, self.packing, memory), memory
