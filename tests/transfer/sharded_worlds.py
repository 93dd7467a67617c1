"""Trainers of several processes on gloo: started from a server that has torch loaded, and what they do.

A program runs on every rank and returns something to the test; `in_world` gives what each rank returned, the exception
that ended it, or None for one that died.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.distribution import Receiver, WeightPublisher
from rose_transfer.layout.export import trace_export
from rose_transfer.layout.layout import LocalTensor, Parameter
from rose_transfer.sharded import LostRank, ShardedPublisher, delivery, making
from rose_transfer.sharded.owned import OwnedBuckets
from rose_transfer.sharded.ranks import Ranks
from rose_transfer.store import Packing, Store
from rose_transfer.store.packing import pack_whole
from rose_transfer.transport.tcp import TcpClient, TcpServer

Program = Callable[..., Any]
Weights = dict[str, torch.Tensor]
WORLD_DEADLINE_S = 100.0
DIED = "died"
TOKEN = "0123456789abcdef" * 2

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
COARSE = pack_whole(PARAMETERS)
"""Two buckets, one of them of float32."""


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
    """What the ranks import, most of it late, is imported once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "numpy.ma",
            "torch._dynamo",
            "torch.distributed.fsdp",
            "rose_transfer.codec.native",
            "rose_transfer.distribution",
            "rose_transfer.sharded",
        ]
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
    dist.barrier()  # a rank that is through before another one has connected would look dead to it
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


def rows(rank: int, group: dist.ProcessGroup, folder: Path, versions: list[int], packing: Packing) -> list[int | None]:
    """Rows split over all ranks; the base of each version."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with publisher(rank, group, folder, packing) as publishing:
        return [publishing.publish(version, _rows(version, mesh)).base for version in versions]


def _rows(version: int, mesh: DeviceMesh) -> Weights:
    whole = weights(version)
    return sharded(whole, mesh, {name: (Shard(0),) for name in whole})


def other_shards_each_time(rank: int, group: dist.ProcessGroup, folder: Path) -> list[int | None]:
    """Rows, then columns, then whole copies: who owns and sends what is planned anew."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bases = []
    with publisher(rank, group, folder) as publishing:
        for version, placement in enumerate((Shard(0), Shard(-1), Replicate()), start=1):
            whole = weights(version)
            parts = sharded(whole, mesh, dict.fromkeys(whole, (placement,)))
            bases.append(publishing.publish(version, parts).base)
    return bases


def same_dtype(rank: int, group: dist.ProcessGroup, folder: Path, packing: Packing, whole: Weights) -> str:
    """Weights that have their published dtype already, under two names one of them, on rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = sharded(whole, mesh, {name: (Shard(0),) for name in whole})
    first = next(iter(parts))
    with publisher(rank, group, folder, packing) as publishing:
        return publishing.publish(1, {**parts, "tied": parts[first]}).key


def stacked_experts(rank: int, group: dist.ProcessGroup, folder: Path, packing: Packing, stack: torch.Tensor) -> str:
    """All experts in one tensor of the trainer, split over the ranks by expert; each is published by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {"experts": LocalTensor(tuple(stack.shape), "float32")}
    export = trace_export(
        tensors, lambda state: {f"{index}.weight": part.T for index, part in enumerate(state["experts"])}
    )
    parts = sharded({"experts": stack}, mesh, {"experts": (Shard(0),)})
    with publisher(rank, group, folder, packing, export=export) as publishing:
        return publishing.publish(1, parts).key


def refusals(rank: int, group: dist.ProcessGroup, folder: Path) -> list[str]:
    """What each rank is told when one of them asks for something that cannot be; the last one is granted."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []
    with publisher(rank, group, folder) as publishing:

        def attempt(version: int, parts: Weights) -> None:
            try:
                publishing.publish(version, parts)
                told.append("published")
            except TransferError as error:
                told.append(str(error))

        attempt(1, _rows(1, mesh))
        attempt(2 + rank, _rows(2, mesh))
        attempt(1, _rows(2, mesh))
        attempt(2, _rows(2, mesh) | ({"scale": torch.zeros(2, 3)} if rank else {}))
        attempt(2, _rows(2, mesh) | ({"head": torch.ones(2)} if rank else {}))
        attempt(2, {name: part for name, part in _rows(2, mesh).items() if name != "scale"})
        attempt(2, {name: part for name, part in _rows(2, mesh).items() if name != "norm.weight" or rank != 1})
        attempt(2, _rows(2, mesh))
    return told


def numbers(rank: int, group: dist.ProcessGroup, folder: Path) -> list[str]:
    """What each rank is told of numbers of versions: those that none is, and those that trainers count in."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []

    def attempt(publishing: ShardedPublisher, version: Any, state: int) -> None:
        try:
            told.append(f"published {publishing.publish(version, _rows(state, mesh)).version}")
        except TransferError as error:
            told.append(str(error))

    with publisher(rank, group, folder) as publishing:
        for version in (-1, True, 2**63, 10**30, 3.5, "4", None):
            attempt(publishing, version, 1)
        attempt(publishing, -1 if rank else 7, 1)
        attempt(publishing, np.int64(7), 7)
        attempt(publishing, torch.tensor(8) if rank else 8, 8)
    return told


def nothing_packed(rank: int, group: dist.ProcessGroup, folder: Path) -> str:
    """What each rank is told of a packing that has no bucket."""
    with publisher(rank, group, folder, pack_whole({})) as publishing:
        try:
            publishing.publish(1, {})
        except TransferError as error:
            return str(error)
    return "published"


def no_memory(rank: int, group: dist.ProcessGroup, folder: Path, step: str) -> list[str]:
    """The second version fails at rank 1, which has no memory for its part of it; then there is some."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []

    def fail(*_: object, **__: object) -> NoReturn:
        raise MemoryError("no memory")

    with publisher(rank, group, folder) as publishing:
        told.append(str(publishing.publish(1, _rows(1, mesh)).base))
        parts = _rows(2, mesh)
        where = {"empty": torch, "rooms": Ranks}.get(step, making)
        whole = getattr(where, step)
        if rank == 1:
            setattr(where, step, fail)
        try:
            publishing.publish(2, parts)
        except (TransferError, MemoryError) as error:
            told.append(str(error))
        setattr(where, step, whole)
        told.append(str(publishing.publish(2, _rows(2, mesh)).base))
    return told


def no_memory_to_restore(rank: int, group: dist.ProcessGroup, folder: Path) -> list[str]:
    """Rank 1 has no memory for the bits of a base, then none for what it takes to hold them, then some."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []

    def fail(*_: object, **__: object) -> NoReturn:
        raise MemoryError("no memory")

    def attempt(version: int) -> None:
        with publisher(rank, group, folder) as publishing:
            try:
                told.append(str(publishing.publish(version, _rows(version, mesh)).base))
            except (TransferError, MemoryError) as error:
                told.append(str(error))

    attempt(1)
    for version, where, step in ((2, delivery, "_rooms"), (2, OwnedBuckets, "put")):
        whole = getattr(where, step)
        if rank == 1:
            setattr(where, step, fail)
        attempt(version)
        setattr(where, step, whole)
    attempt(3)
    return told


def disk_full(rank: int, group: dist.ProcessGroup, folder: Path, room_bytes: int) -> list[str]:
    """A version for which the store has no room, then one with a few changes for which it has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []
    with publisher(rank, group, folder, bytes_max=room_bytes) as publishing:
        publishing.publish(1, _rows(1, mesh))
        other = {name: -part for name, part in _rows(1, mesh).items()}
        try:
            publishing.publish(2, other)
        except TransferError as error:
            told.append(type(error).__name__)
        told.append(str(publishing.publish(2, _rows(2, mesh)).base))
    return told


def little_room(rank: int, group: dist.ProcessGroup, folder: Path, room_bytes: int, versions: int) -> list[str]:
    """Versions of which the second one is pinned; then all are pinned, until there is no room for one more."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = []
    with publisher(rank, group, folder, bytes_max=room_bytes) as publishing:
        store = publishing._store
        for version in range(1, 2 * versions):
            try:
                publishing.publish(version, _rows(version, mesh))
            except TransferError as error:
                told = [f"version {version}", str(error)]
                break
            if store is not None:
                store.collect(versions)
                for kept in store.versions():
                    if kept == 2 or version >= versions:
                        store.pin(kept)
                if version == versions:
                    told_of = store.versions()
        if store is not None:
            assert told_of == tuple(kept for kept in store.versions() if kept <= versions), "none went in vain"
    return told


def dies(rank: int, group: dist.ProcessGroup, folder: Path, version: int, victim: int, at: int) -> list[str]:
    """A version, then the next one, at whose word or transfer number `at` rank `victim` dies.

    The last answer is at how many of them a rank that lives has arrived.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    finish = Ranks._finish
    arrived = 0

    def counted(self: Ranks, what: str, start: Callable[[], Any]) -> None:
        nonlocal arrived
        arrived += 1
        if (rank, arrived) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, what, start)

    told = []
    with publisher(rank, group, folder, COARSE) as publishing:
        told.append(str(publishing.publish(version, _rows(version, mesh)).base))
        Ranks._finish = counted  # type: ignore[method-assign]
        try:
            publishing.publish(version + 1, _rows(version + 1, mesh))
            told.append("published")
        except TransferError as error:
            told.append(type(error).__name__)
    return [*told, str(arrived)]


def keeps_silent(rank: int, group: dist.ProcessGroup, folder: Path) -> list[str]:
    """Rank 1 never publishes; what rank 0 is told, twice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    store = dist.distributed_c10d._get_default_store()
    told = []
    waits = WaitBoard()
    with publisher(rank, group, folder, waits=waits) as publishing:
        if rank == 1:
            store.wait(["told"])
            return []
        for _ in range(2):
            try:
                publishing.publish(1, _rows(1, mesh), timeout_s=0.5)
            except LostRank as error:
                told.append(str(error))
        assert not waits.snapshot()
    store.set("told", "")
    return told


def who_has_a_store(rank: int, group: dist.ProcessGroup, folder: Path) -> list[str]:
    """What is said about a store at the wrong rank, at none, and about a process outside the group."""
    told = []
    alone = dist.new_group([0])
    for members, store in ((group, None if rank == 0 else object()), (alone, object() if rank == 0 else None)):
        try:
            ShardedPublisher(members, PACKING, store=store)  # type: ignore[arg-type]
            told.append("made")
        except ValueError as error:
            told.append(str(error))
    return told


def served(rank: int, group: dist.ProcessGroup, folder: Path, versions: int) -> list[tuple[int, list[bytes]]]:
    """What an engine has after each version that it hears of from the rank with the store."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if rank != 0:
        with publisher(rank, group, folder, compress=True) as publishing:
            for version in range(1, versions + 1):
                publishing.publish(version, _rows(version, mesh))
        return []
    return asyncio.run(_serve(group, folder, versions, mesh))


async def _serve(
    group: dist.ProcessGroup, folder: Path, versions: int, mesh: DeviceMesh
) -> list[tuple[int, list[bytes]]]:
    from distribution_tools import Engine  # here, for no other program should import all that it does

    waits = WaitBoard()
    heard = []
    serve = partial(TcpServer, token=TOKEN, waits=waits)
    async with WeightPublisher(folder, waits=waits, serve=[serve], keep=2) as serving:
        publishing = ShardedPublisher(group, PACKING, store=serving.store, compress=True, waits=waits)
        client = TcpClient("127.0.0.1", serving.servers[0].port, token=TOKEN, waits=waits)
        receiver = Receiver(client, folder.with_name("fetched"), waits=waits, watch_s=0.5)
        engine, after = Engine(), None
        for version in range(1, versions + 1):
            await asyncio.to_thread(publishing.publish, version, _rows(version, mesh))
            await serving.offer()
            async with aclosing(receiver.subscribe(after)) as offers:
                after = await anext(offers)
            await engine.move(receiver, after.version)
            heard.append((after.version, [engine.bits[bucket.bucket_id].tobytes() for bucket in PACKING.buckets]))
        await client.close()
    return heard
