"""What transformers' own export makes of a trainer's tensors, against that export carried out on numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import layout_tools as tools
import numpy as np
import pytest
import torch
from layout_tools import rank_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rose.errors import TransferError
from rose_transfer.layout.export import Export, StateDict, trace_export
from rose_transfer.layout.layout import LocalTensor, Parameter
from rose_transfer.layout.plan import plan
from rose_transfer.layout.sources import Sources
from rose_transfer.layout.trainer_layout import trainer_layout

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def mixture() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=6, num_experts=4, tie_word_embeddings=False)
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def dense() -> PreTrainedModel:
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def shapes_of(model: PreTrainedModel) -> dict[str, LocalTensor]:
    return {name: LocalTensor(tuple(value.shape), "float32") for name, value in model.named_parameters()}


def numbered(tensors: dict[str, LocalTensor]) -> dict[str, torch.Tensor]:
    values, first = {}, 1
    for name, tensor in tensors.items():
        count = math.prod(tensor.shape)
        values[name] = torch.arange(first, first + count).view(tensor.shape)
        first += count
    return values


@pytest.mark.parametrize("make", [mixture, dense])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sharded_experts_are_published_one_by_one(make: Callable[[], PreTrainedModel], world_size: int) -> None:
    model = make()
    tensors = shapes_of(model)
    values = numbered(tensors)
    expected = {name: value.numpy() for name, value in revert_weight_conversion(model, dict(values)).items()}
    published = {name: Parameter(value.shape, "bfloat16") for name, value in expected.items()}
    export = trace_export(tensors, partial(revert_weight_conversion, model))
    layouts, memories = [], {}
    for rank in range(world_size):
        with rank_of(rank, world_size):
            mesh = init_device_mesh("cpu", (world_size,))
            local = {
                name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in values.items()
            }
            layouts.append(trainer_layout(f"trainer {rank}", local, published, export))
            memories[f"trainer {rank}"] = {
                name: tensor.to_local().reshape(-1).numpy() for name, tensor in local.items()
            }
    engine = tools.whole_layout("engine-0", published)
    memory = tools.empty_memory(engine)
    tools.execute(plan(Sources(layouts), engine), memories, memory)
    for name, value in expected.items():
        assert (memory[name] == value.reshape(-1)).all(), name
    if make is mixture:
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in published
        assert "model.layers.1.mlp.experts.gate_up_proj" in tensors


TENSORS = {"fused": LocalTensor((6, 4), "float32"), "other": LocalTensor((6, 4), "float32")}


def exported(export: Callable[[dict[str, torch.Tensor]], StateDict]) -> Export:
    return trace_export(TENSORS, export)


def test_slices_transposes_and_copies_of_memory_are_followed() -> None:
    export = exported(lambda all_: {"a": all_["fused"][2:4].T.contiguous(), "b": all_["fused"][0].clone()})
    model = {"a": Parameter((4, 2), "float32"), "b": Parameter((4,), "float32")}
    fused = torch.arange(24).view(6, 4)
    layout = trainer_layout("trainer 0", {"fused": fused}, model, export)
    memory = tools.empty_memory(engine := tools.whole_layout("engine-0", model))
    tools.execute(plan(Sources([layout]), engine), {"trainer 0": {"fused": fused.reshape(-1).numpy()}}, memory)
    assert memory["a"].tolist() == fused[2:4].T.reshape(-1).tolist()
    assert memory["b"].tolist() == fused[0].tolist()
    assert export.parts["other"] == ()


def threaded(tensor: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tensor.mul_, 2).result()
    return tensor


def caught(tensor: torch.Tensor) -> torch.Tensor:
    with suppress(TransferError):
        tensor.mul_(2)
    return tensor


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[:3], copy[3:] = tensor[3:].clone(), tensor[:3].clone()
    return copy


def pointed_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = torch.zeros_like(tensor[2:4])
    return tensor


Operation = Callable[[torch.Tensor], torch.Tensor]
"""On a tensor of 6 x 4 float32 elements."""
FOLLOWED: dict[str, Operation] = {
    "itself": lambda w: w,
    "alias": lambda w: w.view_as(w),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.T.contiguous(),
    "to the same": lambda w: w.to(torch.float32, copy=True),
    "to another order": lambda w: w[None, None].to(memory_format=torch.channels_last),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.view(2, 3, 4).permute(2, 0, 1),
    "movedim": lambda w: w.view(2, 3, 4).movedim(0, 2),
    "adjoint": lambda w: w.mH,
    "conj of reals": lambda w: w.conj(),
    "real of reals": lambda w: w.real,
    "select": lambda w: w[3],
    "slice": lambda w: w[1:5, 2:],
    "steps": lambda w: w[::2, 1::2],
    "narrow": lambda w: w.narrow(1, 1, 2),
    "one element": lambda w: w[2, 3],
    "split": lambda w: w.split(2)[1],
    "split by sizes": lambda w: w.split((1, 3), dim=1)[1],
    "chunk": lambda w: w.chunk(3)[2],
    "tensor_split": lambda w: w.tensor_split(4)[1],
    "unbind": lambda w: w.unbind(1)[2],
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 2, 2),
    "view": lambda w: w.view(3, 8),
    "reshape": lambda w: w.reshape(2, 12),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(0, (3, 2)),
    "squeeze": lambda w: w.unsqueeze(1).squeeze(),
    "expand by nothing": lambda w: w.expand(1, 6, 4),
    "bits and back": lambda w: w.view(torch.int16)[2:].view(torch.float32),
    "copy of a copy": lambda w: w.T.clone()[1:].T.contiguous()[2:].clone(),
}
COMPUTED: dict[str, Operation] = {
    "add": lambda w: w + 1,
    "add in place": lambda w: w.clone().add_(1),
    "iadd": lambda w: operator.iadd(w.clone(), 1),
    "mul_ of the original": lambda w: w.mul_(2),
    "mul_ of its data": lambda w: w.data.mul_(2) and w,
    "mul_ in a thread": threaded,
    "mul_ that is caught": caught,
    "foreach": lambda w: torch._foreach_mul_([w], 2.0) or w,
    "out": lambda w: torch.mul(w, 2, out=w),
    "out, elsewhere": lambda w: torch.mul(torch.ones(6, 4, device=w.device), 2, out=w),
    "copy_": lambda w: w.copy_(torch.ones(6, 4, device=w.device)),
    "set item": swapped,
    "zero_": lambda w: w[0].zero_() and w,
    "fill_": lambda w: w.fill_(1),
    "neg_": lambda w: w.neg_(),
    "random": lambda w: w.normal_(),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([0], device=w.device), w[1:2]),
    "masked_fill": lambda w: w.masked_fill(w > 0, 0),
    "set_": lambda w: w.set_(torch.ones(6, 4, device=w.device)),
    "resize_": lambda w: w.resize_(4, 6),
    "t_": lambda w: w.t_(),
    "pointed elsewhere": pointed_elsewhere,
    "neg view": torch._neg_view,
    "imaginary part of a conjugate": lambda w: torch.view_as_complex(w.view(12, 2)).conj().imag,
    "as_strided": lambda w: w[2:].clone().as_strided((2, 4), (4, 1), 0),
    "cast": lambda w: w.to(torch.bfloat16),
    "cast there and back": lambda w: w.half().float(),
    "bits": lambda w: w.view(torch.int32),
    "cat": lambda w: torch.cat([w[:3], w[3:]]),
    "stack": lambda w: torch.stack([w, w]),
    "flip": lambda w: w.flip(0),
    "roll": lambda w: w.roll(1, 0),
    "index": lambda w: w[[1, 0, 2]],
    "index_select": lambda w: w.index_select(0, torch.tensor([1], device=w.device)),
    "gather": lambda w: w.gather(0, torch.zeros(1, 4, dtype=torch.int64, device=w.device)),
    "where": lambda w: torch.where(torch.ones(6, 4, dtype=torch.bool, device=w.device), w, 0),
    "repeat": lambda w: w.repeat(2, 1),
    "expand": lambda w: w[:1].expand(6, 4),
    "tril": lambda w: w.tril(),
    "product": lambda w: w @ w.T,
    "sum": lambda w: w.sum(0),
    "pad": lambda w: torch.nn.functional.pad(w, (0, 1)),
    "axes joined across a transposition": lambda w: w.T.reshape(24),
    "new": lambda w: torch.zeros(3),
}


@pytest.mark.parametrize("operation", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_what_moves_no_element_is_published_as_the_export_gives_it(operation: Operation) -> None:
    fused = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    expected = operation(fused.clone())
    model = {"a": Parameter(tuple(expected.shape), "float32")}
    layout = trainer_layout(
        "trainer 0", {"fused": fused}, model, exported(lambda all_: {"a": operation(all_["fused"])})
    )
    memory = {"a": np.full(expected.numel(), np.nan, dtype=np.float32)}
    engine = tools.whole_layout("engine-0", model)
    tools.execute(plan(Sources([layout]), engine), {"trainer 0": {"fused": fused.reshape(-1).numpy()}}, memory)
    assert memory["a"].tobytes() == expected.contiguous().numpy().tobytes()


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("operation", COMPUTED.values(), ids=COMPUTED.keys())
def test_what_computes_is_refused_even_in_place(operation: Operation, inference: bool) -> None:
    """Published would be the trainer's tensor, and not what the export makes of it."""
    with torch.inference_mode(inference), pytest.raises(TransferError):
        exported(lambda all_: {"a": operation(all_["fused"])})


def test_an_operation_that_is_refused_is_named() -> None:
    with pytest.raises(TransferError, match=r"the export applies aten\.add_\.Tensor to other, which is more than"):
        exported(lambda all_: {"a": all_["fused"], "b": all_["other"].clone().add_(1)})
    with pytest.raises(TransferError, match="the export of b is more than a slice of a trainer tensor"):
        exported(lambda all_: {"a": all_["fused"], "b": torch.zeros(3)})


def test_what_is_the_exports_own_fault_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="lost"):
        exported(lambda all_: {"a": all_["lost"]})
