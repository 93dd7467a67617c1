"""A real model's weights before and after real optimiser steps: how many change, by how much, what that costs to send.

SmolLM2-135M learns this project's documents. First a few steps of AdamW at a rate of fine-tuning: the file's weights
stand on a grid of 4 bits, which has far more of them next to zero than a trained model, and those steps take them off
it. From there on, a few steps at the rate in the figure's name; compared are the versions before and after each of the
last ones, rounded to bfloat16 as they are published. What is trained stays in float32.

Figures per rate: `smollm_changed` (share of elements), `smollm_moved_by_one` (share of these that went to a neighbour),
`smollm_halving` (median of P(change | exponent e + 1) / P(change | e) of the old value, 0.5 if it halves), bytes per
changed element ours (`_raw`, in zstd without suffix) and by each peer's method.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench import smollm_model
from bench.codec_peers import PEERS
from bench.codec_versions import Bits
from bench.registry import BenchFailed
from bench.result import ROOT
from rose_transfer.codec import BUCKET_BYTES_MAX, encode, from_wire

FINE_TUNING_RATE, FINE_TUNING_STEPS = 2e-4, 6
STEPS = 4
MEASURED = 2
"""The last ones: Adam's first steps are larger, until it knows the gradients' spread."""
SEQUENCES, TOKENS = 2, 128
WEIGHT_DECAY = 0.01
LOSS_MAX = 8.0
"""Above this the weights are not those of the model; the loss of plain English is 3 to 5."""
SEEN_MIN = 20_000
"""Elements of an exponent, and a hundredth of it changed ones, for its share to count."""


def figures(rates: Sequence[str]) -> dict[str, float | None]:
    """Of `rates` as they stand in the figures' names. Takes a minute or two.

    `smollm_package.missing` is to be asked before. Raises BenchFailed if a delta is not exact.
    """
    model, tokenizer = smollm_model.load()
    tokens = _documents(tokenizer)
    _learn(model, tokens, FINE_TUNING_RATE, FINE_TUNING_STEPS)
    fine_tuned = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, float | None] = {}
    for rate in rates:
        model.load_state_dict(fine_tuned)
        versions = _learn(model, tokens[FINE_TUNING_STEPS * SEQUENCES * TOKENS :], float(rate), STEPS)
        found |= {f"{name}_{rate}": value for name, value in _compare(versions[-MEASURED - 1 :]).items()}
    return found


def _learn(model: LlamaForCausalLM, tokens: torch.Tensor, learning_rate: float, steps: int) -> list[Bits]:
    """What would be published before the first step, and after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)
    versions = [_published(model)]
    for batch in tokens[: steps * SEQUENCES * TOKENS].reshape(steps, SEQUENCES, TOKENS):
        loss = model(input_ids=batch, labels=batch).loss
        if not torch.isfinite(loss) or loss > LOSS_MAX:
            raise BenchFailed(f"SmolLM2 has a loss of {loss.item():.3g} on plain English", expected="3 to 5")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        versions.append(_published(model))
    return versions


def _documents(tokenizer: Tokenizer) -> torch.Tensor:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))
    return torch.tensor(tokenizer.encode(text).ids)


def _published(model: LlamaForCausalLM) -> Bits:
    """All parameters as a flat array of bfloat16 bits; tied ones once."""
    parts = [value.detach().to(torch.bfloat16).reshape(-1).view(torch.uint16) for value in model.parameters()]
    bits: Bits = torch.cat(parts).numpy()
    return bits


def _compare(versions: list[Bits]) -> dict[str, float]:
    sizes = dict.fromkeys(("raw", "zstd", *(peer.name for peer in PEERS)), 0)
    changed = by_one = 0
    for old, new in pairwise(versions):
        moved = old != new
        steps = _ordered(new[moved]) - _ordered(old[moved])
        changed += steps.size
        by_one += int(np.count_nonzero(np.abs(steps) == 1))
        for name, size in _sent_bytes(old, new).items():
            sizes[name] += size
    return {
        "smollm_changed": changed / (versions[0].size * (len(versions) - 1)),
        "smollm_moved_by_one": by_one / changed,
        "smollm_halving": halving(versions[-2], versions[-1]),
        "smollm_bytes_per_changed_raw": sizes["raw"] / changed,
        "smollm_bytes_per_changed": sizes["zstd"] / changed,
    } | {f"smollm_peer_{peer.name}": sizes[peer.name] / changed for peer in PEERS}


def halving(old: Bits, new: Bits) -> float:
    """Median, over the exponents that enough elements have, of the next exponent's chance to change by this one's.

    NaN if there are not two such exponents next to each other.
    """
    exponents = old >> np.uint16(7) & np.uint16(0xFF)
    there = np.bincount(exponents, minlength=256)
    gone = np.bincount(exponents[old != new], minlength=256)
    counts = (there >= SEEN_MIN) & (gone >= SEEN_MIN // 100)
    share = gone / np.maximum(there, 1)
    # Near 1 a share cannot double any more.
    ratios = [share[e + 1] / share[e] for e in range(255) if counts[e] and counts[e + 1] and share[e] < 0.5]
    return float(np.median(ratios)) if ratios else float("nan")


def _sent_bytes(old: Bits, new: Bits) -> dict[str, int]:
    sizes = dict.fromkeys(("raw", "zstd", *(peer.name for peer in PEERS)), 0)
    elements = BUCKET_BYTES_MAX // 2
    for at in range(0, old.size, elements):
        before, after = old[at : at + elements], new[at : at + elements]
        delta = encode(before, after, 0)
        data = delta.to_wire(compress=True)
        target = before.copy()
        from_wire(data).apply(target, 0)
        if not np.array_equal(target, after):
            raise BenchFailed("a delta of SmolLM2 does not give the new bits")
        sizes["raw"] += len(delta.to_wire())
        sizes["zstd"] += len(data)
        for peer in PEERS:
            sizes[peer.name] += len(peer.encode(before, after))
    return sizes


def _ordered(bits: Bits) -> NDArray[np.int32]:
    """In the order of the numbers that the bits stand for."""
    signed = bits.view(np.int16).astype(np.int32)
    return np.where(signed < 0, -(signed & 0x7FFF), signed)
