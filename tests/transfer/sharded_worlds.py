"""Trainers of several processes on gloo: started from a server that has torch loaded, and what they do.

A program runs on every rank and returns something to the test; `in_world` gives what each rank returned, the exception
that ended it, or None for one that died.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from rose_transfer.layout.layout import Parameter
from rose_transfer.sharded import ShardedPublisher
from rose_transfer.store import Packing, Store
from rose_transfer.store.packing import pack_whole

Program = Callable[..., Any]
Weights = dict[str, torch.Tensor]
WORLD_DEADLINE_S = 60.0
DIED = "died"

ROWS = 7
"""Odd: no shard of it is even."""
PARAMETERS = {
    "embed.weight": Parameter((21, 6), "bfloat16"),
    "up.weight": Parameter((ROWS, 6), "bfloat16"),
    "up.bias": Parameter((ROWS,), "bfloat16"),
    "down.weight": Parameter((6, ROWS), "bfloat16"),
    "norm.weight": Parameter((6,), "float32"),
    "scale": Parameter((1, 3), "bfloat16"),
}
PACKING = pack_whole(PARAMETERS, bucket_bytes=96)
"""Buckets of up to 48 elements: parameters lie across their edges."""


def weights(version: int, dtype: torch.dtype = torch.float32) -> Weights:
    """The whole model: at each version about a third of the elements of the one before have moved."""
    made = {}
    for name, parameter in sorted(PARAMETERS.items()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        value = torch.randn(parameter.shape, generator=generator)
        for _ in range(version):
            value = value + (torch.rand(value.shape, generator=generator) < 0.3) * value * 2**-6
        made[name] = value.to(dtype)
    return made


@cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "rose_transfer.sharded", "rose_transfer.codec.native"]
    )
    return context


def in_world(size: int, program: Program, *args: Any) -> list[Any]:
    """Run `program(rank, group, *args)` on `size` ranks and wait for all of them, at most `WORLD_DEADLINE_S`."""
    with tempfile.TemporaryDirectory() as folder:
        processes, answers = [], []
        for rank in range(size):
            ours, theirs = _server().Pipe(duplex=False)
            process = _server().Process(target=_rank, args=(theirs, rank, size, folder, program, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            answers.append(ours)
        try:
            return [_answer(answer) for answer in answers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(answer: Connection) -> Any:
    if not wait([answer], timeout=WORLD_DEADLINE_S):
        raise TimeoutError("a rank neither answered nor died")
    try:
        return answer.recv()
    except EOFError:
        return DIED


def _rank(answer: Connection, rank: int, size: int, folder: str, program: Program, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(f"{folder}/store", size))
    group = dist.new_group(backend="gloo")
    try:
        result = program(rank, group, *args)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        result = error
    answer.send(result)
    answer.close()
    os._exit(0)


@contextmanager
def publisher(
    rank: int, group: dist.ProcessGroup, folder: Path, packing: Packing = PACKING, **options: Any
) -> Iterator[ShardedPublisher]:
    """The publisher of a rank, with the store in `folder` at rank 0."""
    bytes_max = options.pop("bytes_max", None)
    store = Store(folder, bytes_max=bytes_max, compress=options.get("compress", False)) if rank == 0 else None
    try:
        yield ShardedPublisher(group, packing, store=store, **options)
    finally:
        if store is not None:
            store.close()


def sharded(whole: Weights, mesh: DeviceMesh, placements: Mapping[str, tuple[Placement, ...]]) -> Weights:
    """This rank's part of a model; what has no placement is replicated."""
    replicated = (Replicate(),) * mesh.ndim
    return {
        name: distribute_tensor(value, mesh, placements.get(name, replicated), src_data_rank=None)
        for name, value in whole.items()
    }


class Block(nn.Module):
    def __init__(self, whole: Weights) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, 6)
        self.up = nn.Linear(6, ROWS)
        self.down = nn.Linear(ROWS, 6, bias=False)
        self.norm = nn.RMSNorm(6)
        self.scale = nn.Parameter(torch.zeros(1, 3))
        self.load_state_dict(whole)


def fsdp_over_tp(rank: int, group: dist.ProcessGroup, folder: Path, versions: int, compress: bool) -> list[str]:
    """fp32 masters under FSDP2 (2 ways) over tensor parallel (2 ways), published version by version."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    keys = []
    with publisher(rank, group, folder, compress=compress) as publishing:
        for version in range(1, versions + 1):
            block = Block(weights(version))
            parallelize_module(
                block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None
            )
            fully_shard(block, mesh=grid["fsdp"])
            keys.append(publishing.publish(version, dict(block.state_dict())).key)
    return keys


def pipeline_stages(rank: int, group: dist.ProcessGroup, folder: Path, versions: int) -> list[str]:
    """Two stages of two tensor parallel ranks. A parameter of one row leaves the second rank an empty shard."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    first = {"embed.weight", "scale"}
    placements = {
        "embed.weight": (Shard(0),),
        "scale": (Shard(0),),
        "up.weight": (Shard(0),),
        "down.weight": (Shard(1),),
    }
    keys = []
    with publisher(rank, group, folder) as publishing:
        for version in range(1, versions + 1):
            mine = {name: value for name, value in weights(version).items() if (name in first) == (rank < 2)}
            keys.append(publishing.publish(version, sharded(mine, grid["tp"], placements)).key)
    return keys
