"""Weights that lie on a GPU: published, published from shards, and changed in place."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from carried_tools import gpus_for_two_ranks
from live_tools import Line, memory_for, rank_layout, same_bits
from sharded_worlds import PACKING, publisher, sharded, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from rose_transfer.layout.layout import Layout
from rose_transfer.live import LiveUpdate, LiveWeights
from rose_transfer.store import Store
from rose_transfer.store.buckets import pack

pytestmark = pytest.mark.gpu

VERSIONS = 3
WORLD_S = 60.0


def on_gpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "layout", [rank_layout(), rank_layout(1, 2), rank_layout(dtype="float32")], ids=["whole", "half", "float32"]
)
@pytest.mark.parametrize(("start", "goal"), [(1, 2), (1, 3), (3, 1)])
def test_weights_on_a_gpu_get_from_version_to_version_where_they_are(
    tmp_path: Path, layout: Layout, start: int, goal: int
) -> None:
    line = Line(tmp_path, [layout])
    memory = on_gpu(memory_for(layout, line.states[start]))
    places = {name: tensor.data_ptr() for name, tensor in memory.items()}
    update = LiveUpdate(
        LiveWeights(layout, line.packing, memory), line.store.steps(start, goal), line.store.objects.read, tmp_path
    )
    update.stage()
    assert same_bits(on_host(memory), memory_for(layout, line.states[start]))
    update.commit()
    assert same_bits(on_host(memory), memory_for(layout, line.states[goal]))
    update.roll_back()
    assert same_bits(on_host(memory), memory_for(layout, line.states[start]))
    assert places == {name: tensor.data_ptr() for name, tensor in memory.items()}


def whole_keys(folder: Path, *, gpu: bool) -> list[str]:
    """The manifests of the versions published from whole state dicts."""
    store = Store(folder)
    keys = []
    for version in range(1, VERSIONS + 1):
        state = on_gpu(weights(version)) if gpu else weights(version)
        keys.append(store.publish(version, PACKING, pack(PACKING, state), base=store.newest).key)
    store.close()
    return keys


def test_a_state_on_a_gpu_is_published_as_one_in_host_memory(tmp_path: Path) -> None:
    assert whole_keys(tmp_path / "gpu", gpu=True) == whole_keys(tmp_path / "host", gpu=False)


def _rank(answers: Any, rank: int, gpu: int, folder: Path) -> None:
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", rank=rank, world_size=2, store=dist.FileStore(str(folder / "meet"), 2))
    mesh = init_device_mesh("cuda", (2,))
    group = dist.new_group(backend="nccl")
    keys = []
    with publisher(rank, group, folder / "sharded") as publishing:
        for version in range(1, VERSIONS + 1):
            whole = on_gpu(weights(version))
            parts = sharded(whole, mesh, dict.fromkeys(whole, (Shard(0),)))
            keys.append(publishing.publish(version, parts).key)
    answers.put(keys)


def test_shards_on_gpus_are_published_by_nccl_as_the_whole_is(tmp_path: Path) -> None:
    gpus = gpus_for_two_ranks()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(answers, rank, gpus[rank], tmp_path), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        found = [answers.get(timeout=WORLD_S) for _ in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert found == [whole_keys(tmp_path / "whole", gpu=False)] * 2
