"""What transformers' own export makes of a trainer's tensors, against that export carried out on numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import layout_tools as tools
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


@pytest.mark.parametrize(
    "export",
    [
        lambda all_: {"a": torch.cat([all_["fused"], all_["other"]])},
        lambda all_: {"a": all_["fused"] + 1},
        lambda all_: {"a": all_["fused"].to(torch.bfloat16)},
        lambda all_: {"a": torch.zeros(3)},
        lambda all_: {"a": all_["fused"].view(torch.int32)},
    ],
)
def test_an_export_that_computes_is_refused(export: Callable[[dict[str, torch.Tensor]], StateDict]) -> None:
    with pytest.raises(TransferError, match="the export of a is more than a slice"):
        exported(export)
