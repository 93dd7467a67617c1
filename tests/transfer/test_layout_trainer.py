"""Layouts read off DTensors, FSDP2 and tensor parallel modules, on a process group that only pretends."""

from __future__ import annotations

import layout_tools as tools
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_tools import rank_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rose.errors import TransferError
from rose_transfer.layout.box import Box
from rose_transfer.layout.export import Export
from rose_transfer.layout.holdings import Replication, replication
from rose_transfer.layout.layout import Layout, LocalTensor, Pad, Parameter, Piece
from rose_transfer.layout.plan import plan
from rose_transfer.layout.sharding import Place, Split, shard_of
from rose_transfer.layout.sources import Sources
from rose_transfer.layout.trainer_layout import trainer_layout as exported_layout

FSDP, TP = 4, 2


def trainer_layout(holder: str, tensors: dict[str, torch.Tensor], model: dict[str, Parameter]) -> Layout:
    """The layout of a trainer whose tensors are named as published."""
    return exported_layout(holder, tensors, model, Export.under_own_names(model))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (FSDP, TP), mesh_dim_names=("fsdp", "tp"))


def tags(name: str, model: dict[str, Parameter]) -> torch.Tensor:
    """The whole parameter, each element holding its own number."""
    return torch.from_numpy(tools.tagged(model)[name])


def check(layout: Layout, model: dict[str, Parameter], local: dict[str, torch.Tensor]) -> None:
    """What the layout says lies in local memory is what lies there."""
    described = tools.memory_of(layout, tools.tagged(model))
    for name, tensor in local.items():
        assert (described[name] == tensor.detach().reshape(-1).long().numpy()).all(), (layout.holder, name)


PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "both replicate": (Replicate(), Replicate()),
    "rows and columns": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "columns twice": (Shard(1), Shard(1)),
    "replicas of rows": (Replicate(), Shard(0)),
    "rows in FSDP order": (_StridedShard(0, split_factor=TP), Shard(0)),
    "strided alone": (_StridedShard(0, split_factor=3), Replicate()),
    "strided columns": (Replicate(), _StridedShard(1, split_factor=2)),
}


@pytest.mark.parametrize("shape", [(16, 8), (10, 6), (3, 1), (1, 9), (0, 4)], ids=str)
@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_dtensor_holds_what_its_layout_says(shape: tuple[int, int], placements: tuple[Placement, Placement]) -> None:
    model = {"w": Parameter(shape, "bfloat16")}
    layouts = []
    for rank in range(FSDP * TP):
        with rank_of(rank, FSDP * TP):
            tensor = distribute_tensor(tags("w", model), mesh(), placements, src_data_rank=None)
            layouts.append(trainer_layout(f"trainer {rank}", {"w": tensor}, model))
            check(layouts[-1], model, {"w": tensor.to_local()})
    held = replication(layouts)["w"]
    assert held.fewest >= (1 if 0 not in shape else 0)
    plan(Sources(layouts), tools.whole_layout("engine-0", model))


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows, bias=True)
        self.down = nn.Linear(rows, 6, bias=False)
        self.norm = nn.LayerNorm(6, bias=False)


def sharded(rows: int, model: dict[str, Parameter]) -> dict[str, torch.Tensor]:
    """A block under tensor parallel and FSDP2, each element holding its own number."""
    grid = mesh()
    block = Block(rows)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(tags(name, model))
    parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    fully_shard(block, mesh=grid["fsdp"])
    return dict(block.named_parameters())


@pytest.mark.parametrize("rows", [16, 10, 9, 7, 6, 2])
def test_fsdp_over_tensor_parallel_with_uneven_and_empty_shards(rows: int) -> None:
    shapes = {"up.weight": (rows, 6), "up.bias": (rows,), "down.weight": (6, rows), "norm.weight": (6,)}
    model = {name: Parameter(shape, "bfloat16") for name, shape in shapes.items()}
    layouts = []
    for rank in range(FSDP * TP):
        with rank_of(rank, FSDP * TP):
            parameters = sharded(rows, model)
            layouts.append(trainer_layout(f"trainer {rank}", parameters, model))
            local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in parameters.items()}
            check(layouts[-1], model, local)
    assert replication(layouts)["up.weight"] == Replication(1, 1)
    assert replication(layouts)["norm.weight"] == Replication(TP, TP)
    engine = tools.whole_layout("engine-0", model)
    memory = tools.empty_memory(engine)
    values = tools.tagged(model)
    tools.execute(plan(Sources(layouts), engine), {x.holder: tools.memory_of(x, values) for x in layouts}, memory)
    for name, value in values.items():
        assert (memory[name] == value.reshape(-1)).all(), name


def test_the_last_fsdp_ranks_may_hold_nothing() -> None:
    with rank_of(FSDP * TP - 1, FSDP * TP):
        model = {"up.weight": Parameter((6, 6), "bfloat16")}
        tensor = distribute_tensor(tags("up.weight", model), mesh()["fsdp"], [Shard(0)], src_data_rank=None)
        layout = trainer_layout("trainer 7", {"up.weight": tensor}, model)
    assert layout.pieces == ()
    assert layout.tensors["up.weight"].shape == (0, 6)


def test_tp8_pp2_feeds_tp4() -> None:
    """16 trainer ranks: 8 shards of each of 2 stages; 4 engine ranks that fuse q, k, v and pad the vocabulary."""
    heads, kv_heads, hidden, vocabulary = 8, 2, 16, 21
    shapes = {"embed": (vocabulary, hidden)}
    for layer in range(4):
        shapes |= {f"{layer}.q": (heads * 2, hidden), f"{layer}.k": (kv_heads * 2, hidden), f"{layer}.norm": (hidden,)}
    model = {name: Parameter(shape, "bfloat16") for name, shape in shapes.items()}
    values = tools.tagged(model)
    trainers = []
    for rank in range(16):
        stage, place = divmod(rank, 8)
        with rank_of(rank, 16):
            grid = init_device_mesh("cpu", (2, 8), mesh_dim_names=("pp", "tp"))
            mine = [
                n for n in model if (n == "embed" and stage == 0) or n[:2] in (f"{2 * stage}.", f"{2 * stage + 1}.")
            ]
            tensors = {
                name: distribute_tensor(
                    tags(name, model),
                    grid["tp"],
                    [Replicate() if name.endswith("norm") else Shard(0)],
                    src_data_rank=None,
                )
                for name in mine
            }
            trainers.append(trainer_layout(f"trainer {rank}", tensors, model))
            check(trainers[-1], model, {name: tensor.to_local() for name, tensor in tensors.items()})
            assert place == grid.get_local_rank("tp")
    sources = Sources(trainers)
    memories = {trainer.holder: tools.memory_of(trainer, values) for trainer in trainers}
    for rank in range(4):
        engine = _engine_rank(rank, model)
        memory = tools.zeroed(engine)
        made = plan(sources, engine)
        tools.execute(made, memories, memory)
        described = tools.memory_of(engine, values)
        for name in engine.tensors:
            assert (memory[name] == described[name]).all(), name
        for layer in range(4):
            senders = {s.holder for s in made.segments if s.source.parameter.startswith(f"{layer}.")}
            assert {int(sender.split()[1]) // 8 for sender in senders} == {layer // 2}


def _engine_rank(rank: int, model: dict[str, Parameter]) -> Layout:
    hidden = 16
    tensors, pieces = {"embed": LocalTensor((8, hidden), "bfloat16")}, []
    rows = min(8, 21 - 8 * rank) if rank < 3 else 0
    if rows > 0:
        pieces.append(Piece("embed", Box((8 * rank, 0), (rows, hidden)), "embed", 0, (hidden, 1)))
    pads = [Pad("embed", Box((max(rows, 0), 0), (8 - max(rows, 0), hidden)))] if rows < 8 else []
    for layer in range(4):
        tensors[f"{layer}.qk"] = LocalTensor((6, hidden), "bfloat16")
        tensors[f"{layer}.norm"] = LocalTensor((hidden,), "bfloat16")
        pieces += [
            Piece(f"{layer}.q", Box((4 * rank, 0), (4, hidden)), f"{layer}.qk", 0, (hidden, 1)),
            Piece(f"{layer}.k", Box((2 * (rank // 2), 0), (2, hidden)), f"{layer}.qk", 4 * hidden, (hidden, 1)),
            Piece(f"{layer}.norm", Box((0,), (hidden,)), f"{layer}.norm", 0, (1,)),
        ]
    return Layout(f"engine-0 tp {rank}", model, tensors, tuple(pieces), tuple(pads))


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with rank_of(5, FSDP * TP):
        half = DeviceMesh("cpu", [0, 1, 2, 3])
        tensor = DTensor.from_local(torch.empty(0), half, [Shard(0)], run_check=False, shape=(8,), stride=(1,))
        assert trainer_layout("trainer 5", {"w": tensor}, {"w": Parameter((8,), "bfloat16")}).pieces == ()


def test_partial_sums_are_refused() -> None:
    with rank_of(0, FSDP * TP):
        tensor = DTensor.from_local(torch.zeros(4), mesh()["tp"], [Partial()], run_check=False)
        with pytest.raises(TransferError, match=r"trainer 0: w is placed as .*not partial sums"):
            trainer_layout("trainer 0", {"w": tensor}, {"w": Parameter((4,), "bfloat16")})


def test_a_local_shape_that_no_reading_gives_is_refused() -> None:
    with rank_of(0, FSDP * TP):
        tensor = DTensor.from_local(torch.zeros(3), mesh()["tp"], [Shard(0)], run_check=False, shape=(8,), stride=(1,))
        with pytest.raises(TransferError, match=r"trainer 0: the local part of w has shape \(3,\), which no reading"):
            trainer_layout("trainer 0", {"w": tensor}, {"w": Parameter((8,), "bfloat16")})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 3), r"trainer 0: w has shape \(4, 3\); expected \(4, 2\), as exported"),
        (torch.zeros(4, 2).T.contiguous().T, "trainer 0: w is not contiguous"),
    ],
)
def test_tensors_that_are_not_as_published_are_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        trainer_layout("trainer 0", {"w": tensor}, {"w": Parameter((4, 2), "bfloat16")})
    with pytest.raises(TransferError, match=r"trainer 0: w, of shape .* is not among the tensors that are exported"):
        trainer_layout("trainer 0", {"w": tensor}, {})


@settings(deadline=None)
@given(st.data())
def test_shards_follow_torch_rule_by_rule(data: st.DataObject) -> None:
    """Against torch's own splitting of an index, any mesh of two axes on one array axis."""
    size = data.draw(st.integers(0, 40))
    mesh_shape = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)))
    coordinate = tuple(data.draw(st.integers(0, ways - 1)) for ways in mesh_shape)
    factors = tuple(data.draw(st.integers(1, 4)) for _ in mesh_shape)
    index = torch.arange(size)
    for ways, place, factor in zip(mesh_shape, coordinate, factors, strict=True):
        rule = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
        shards, _ = rule._split_tensor(index, ways, with_padding=False)
        index = shards[place]
    shard = shard_of("w", (size,), Place(mesh_shape, coordinate, tuple(Split(0, f) for f in factors)), "w")
    held = np.full(shard.shape, -1)
    for piece in shard.pieces:
        held[piece.offset : piece.offset + piece.box.elements] = np.arange(piece.box.starts[0], piece.box.ends[0])
    assert held.tolist() == index.tolist()


@pytest.mark.parametrize(
    "place",
    [
        Place((2,), (2,), (Split(0),)),
        Place((2, 2), (0, 0), (Split(0),)),
        Place((2,), (0,), (Split(1),)),
        Place((2,), (0,), (Split(0, 0),)),
    ],
)
def test_a_place_that_does_not_fit_is_refused(place: Place) -> None:
    with pytest.raises(TransferError, match="w"):
        shard_of("w", (8,), place, "w")
