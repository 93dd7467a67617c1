"""vLLM's own models as ranks of engines, brought from one version to another; runs in the process of `layout_main`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rose_executor.engine_model import ModelSource, as_rank, build
from rose_executor.engine_rank import EngineRank
from rose_executor.layout_trace import trace_layout
from rose_transfer.layout.layout import Layout
from rose_transfer.live import LiveUpdate, LiveWeights
from rose_transfer.store import Packing, Store
from rose_transfer.store.buckets import pack
from rose_transfer.store.packing import pack_for

Weights = dict[str, torch.Tensor]


def bring_ranks(folder: Path, source: ModelSource, ranks: Sequence[EngineRank]) -> dict[str, Any]:
    """Publish two versions for ranks of engines of whatever sizes, and bring each there and back.

    Says which local tensors differ from what vLLM's loader makes of the same version, and how many bytes of the delta
    each rank needs.
    """
    layouts = [trace_layout(f"{rank}", source, rank) for rank in ranks]
    packing = pack_for(layouts)
    versions = {1: drawn(source, 1)}
    versions[2] = moved(versions[1])
    store = Store(folder)
    for version, weights in versions.items():
        store.publish(version, packing, pack(packing, weights), base=store.newest)
    different: list[str] = []
    shares: list[int] = []
    for layout, rank in zip(layouts, ranks, strict=True):
        found, share = _bring(layout, packing, store, source, rank, versions)
        different += [f"{rank}: {name}" for name in found]
        shares.append(share)
    store.close()
    return {"different": different, "shares": shares, "delta": store.manifests()[-1].encoded_bytes}


def _bring(
    layout: Layout, packing: Packing, store: Store, source: ModelSource, rank: EngineRank, versions: dict[int, Weights]
) -> tuple[list[str], int]:
    live = loaded(source, rank, versions[1])
    weights = LiveWeights(layout, packing, live)
    update = LiveUpdate(weights, store.steps(1, 2), store.objects.read, store.folder)
    update.stage()
    update.commit()
    different = differing(layout, live, loaded(source, rank, versions[2]))
    update.roll_back()
    return different + differing(layout, live, loaded(source, rank, versions[1])), update.encoded_bytes


def loaded(source: ModelSource, rank: EngineRank, weights: Weights) -> Weights:
    """The parameters and buffers of a rank as vLLM's loader fills them."""
    with as_rank(source, rank) as config, torch.no_grad():
        model = build(config, with_memory=True)
        model.load_weights(iter(weights.items()))  # type: ignore[operator]
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differing(layout: Layout, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Local tensors of which a bit differs."""
    return [
        name
        for name in layout.tensors
        if not torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
    ]


def drawn(source: ModelSource, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(getattr(torch, value.dtype))
        for name, value in source.parameters.items()
    }


def moved(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.05, tensor * 1.01, tensor)
        for name, tensor in weights.items()
    }
