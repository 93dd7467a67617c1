"""Layouts of vLLM's models, traced and certified in one process that imports vLLM once (`layout_main`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rose.machine import look
from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, Piece
from rose_transfer.layout.layout_json import from_json

# Sent to one worker with the engine's tests, so that only one process at a time imports vLLM.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    root = Path(__file__).parents[2]
    rooms = os.pathsep.join(str(root / room) for room in (".", "executor", "transfer", "scheduler"))
    command = [sys.executable, str(Path(__file__).with_name("layout_main.py")), str(folder)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": rooms},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


def case(answers: dict[str, Any], name: str) -> dict[str, Any]:
    answer: dict[str, Any] = answers[name]
    assert "error" not in answer, answer["error"]
    return answer


def layouts(answers: dict[str, Any], name: str) -> list[Layout]:
    return [from_json(json.dumps(layout)) for layout in case(answers, name)["layouts"]]


def pieces(layout: Layout, parameter: str) -> list[Piece]:
    return [piece for piece in layout.pieces if piece.parameter == parameter]


ENGINES = [f"{model} tp{size}" for model in ("qwen2", "qwen3", "llama", "qwen3_moe") for size in (1, 2, 4)]
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


@pytest.mark.parametrize(
    "name",
    [
        *ENGINES,
        *("qwen3_moe ep2", "qwen2 pp2", "llama pp2 tp2", "qwen3 with a head", "wider engine"),
        *("gpt2", "phi3", "deepseek_v3", "gpt_oss"),
    ],
)
def test_index_tags_find_every_element_where_the_trace_put_it(answers: dict[str, Any], name: str) -> None:
    answer = case(answers, name)
    assert answer["certified"] > 10_000
    assert answer.get("unused", []) == []


def test_the_certificate_sees_a_piece_in_the_wrong_place(answers: dict[str, Any]) -> None:
    said = case(answers, "spoiled")
    assert "engine-0 tp 1: model.layers.0.self_attn.qkv_proj.weight[32, 0] holds" in said["moved"]
    assert "holds model.layers.0.self_attn.k_proj.weight[8, 0]; expected nothing, as traced" in said["left out"]


def test_query_key_and_value_rows_share_one_tensor(answers: dict[str, Any]) -> None:
    rank = layouts(answers, "qwen3 tp2")[1]
    found = [pieces(rank, f"{ATTENTION}.{name}_proj.weight") for name in "qkv"]
    assert [[(piece.box, piece.tensor, piece.offset) for piece in each] for each in found] == [
        [(Box((32, 0), (32, 64)), f"{ATTENTION}.qkv_proj.weight", 0)],
        [(Box((8, 0), (8, 64)), f"{ATTENTION}.qkv_proj.weight", 32 * 64)],
        [(Box((8, 0), (8, 64)), f"{ATTENTION}.qkv_proj.weight", 40 * 64)],
    ]


def test_biases_follow_their_rows(answers: dict[str, Any]) -> None:
    (bias,) = pieces(layouts(answers, "qwen2 tp2")[1], f"{ATTENTION}.k_proj.bias")
    assert (bias.box, bias.tensor, bias.offset) == (Box((8,), (8,)), f"{ATTENTION}.qkv_proj.bias", 32)


def test_gate_and_up_are_halves_of_one_tensor_and_down_is_cut_by_columns(answers: dict[str, Any]) -> None:
    rank = layouts(answers, "llama tp4")[2]
    (up,) = pieces(rank, f"{MLP}.up_proj.weight")
    assert (up.box, up.tensor, up.offset) == (Box((48, 0), (24, 64)), f"{MLP}.gate_up_proj.weight", 24 * 64)
    (down,) = pieces(rank, f"{MLP}.down_proj.weight")
    assert (down.box, down.strides) == (Box((0, 48), (64, 24)), (24, 1))


def test_key_value_heads_are_replicated_where_ranks_outnumber_them(answers: dict[str, Any]) -> None:
    copies = case(answers, "llama tp4")["replication"]
    assert copies[f"{ATTENTION}.k_proj.weight"] == [2, 2]
    assert copies[f"{ATTENTION}.q_proj.weight"] == [1, 1]
    assert copies["model.norm.weight"] == [4, 4]


def test_the_padded_vocabulary_is_declared_and_never_addressed(answers: dict[str, Any]) -> None:
    ranks = layouts(answers, "llama tp4")
    assert [len(rank.pads) for rank in ranks] == [0, 0, 0, 2]
    assert {(pad.tensor, pad.box) for pad in ranks[3].pads} == {
        (name, Box((235, 0), (21, 64))) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }


def test_a_tied_head_is_no_tensor_of_its_own(answers: dict[str, Any]) -> None:
    assert "lm_head.weight" not in layouts(answers, "qwen3 tp1")[0].tensors
    assert "lm_head.weight" in layouts(answers, "qwen3 with a head")[0].tensors


def test_experts_lie_in_two_stacks_and_are_cut_by_tensor_parallelism(answers: dict[str, Any]) -> None:
    rank = layouts(answers, "qwen3_moe tp2")[1]
    (gate,) = pieces(rank, f"{MLP}.experts.3.gate_proj.weight")
    (up,) = pieces(rank, f"{MLP}.experts.3.up_proj.weight")
    assert gate.tensor == up.tensor
    assert gate.box == up.box == Box((16, 0), (16, 64))
    assert (gate.offset, up.offset) == (3 * 32 * 64, 3 * 32 * 64 + 16 * 64)


def test_expert_parallel_ranks_own_whole_experts(answers: dict[str, Any]) -> None:
    ranks = layouts(answers, "qwen3_moe ep2")
    for place, rank in enumerate(ranks):
        owned = {p.parameter.split(".")[5] for p in rank.pieces if p.parameter.startswith(f"{MLP}.experts.")}
        assert owned == {str(expert) for expert in range(4 * place, 4 * place + 4)}
    (down,) = pieces(ranks[1], f"{MLP}.experts.5.down_proj.weight")
    assert (down.box, down.offset) == (Box((0, 0), (64, 32)), 64 * 32)


def test_stages_own_their_layers(answers: dict[str, Any]) -> None:
    ranks = layouts(answers, "llama pp2 tp2")
    owned = [{p.parameter.removeprefix("model.") for p in rank.pieces} for rank in ranks]
    for first, last in ((0, 2), (1, 3)):
        assert {"embed_tokens.weight", "layers.0.mlp.up_proj.weight"} <= owned[first]
        assert {"norm.weight", "lm_head.weight", "layers.1.mlp.up_proj.weight"} <= owned[last]
        assert not owned[first] & owned[last]


def test_a_wider_engine_keeps_the_parameters_as_published(answers: dict[str, Any]) -> None:
    assert case(answers, "wider engine")["dtypes"] == ["float32"]


REFUSED = {
    "missing": "nothing is written to model.norm.weight[0:64]",
    "misshapen": "Qwen3ForCausalLM cannot load model.norm.weight: AssertionError",
    "unknown": "Qwen3ForCausalLM cannot load model.layers.0.surprise: ValueError",
    "heads that do not divide": "vLLM cannot build",
    "arithmetic": "aten.add.Tensor is applied to model.norm.weight",
    "in place": "aten.add_.Tensor is applied to model.norm.weight",
    "cast": "aten._to_copy.default is applied to model.norm.weight",
    "value": "aten.gt.Scalar is applied to model.norm.weight",
    "mask": "aten.gt.Scalar is applied to model.norm.weight",
    "repeat": "model.norm.weight is repeated to fill (64,) of model.norm.weight",
    "twice": "model.norm.weight[0:8] is written more than once",
    "nothing": "nothing is written to model.norm.weight[0:64]",
    "ones": "model.norm.weight is filled with 1",
    "zeros after": "model.norm.weight[0:64] is filled with zeros after it was loaded",
    "scratch": "aten.empty_like.default is applied to model.norm.weight",
    "constant": "aten.ones_like.default is applied to model.norm.weight",
    "zeros before": "accepted",
    "slices": "accepted",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_moving_slices_cannot_do_is_refused_by_name(answers: dict[str, Any], name: str) -> None:
    said = case(answers, "refusals")[name]
    assert REFUSED[name] in said
    assert said == "accepted" or "engine-0 tp 0" in said


def test_a_layout_is_traced_once_for_all_engines_of_a_kind(answers: dict[str, Any]) -> None:
    assert case(answers, "cached") == {"same": True, "holder": "engine-1 tp 0"}


def test_tracing_leaves_the_groups_and_tables_of_a_live_engine_alone(answers: dict[str, Any]) -> None:
    left = case(answers, "traces left")
    assert (left["group"], left["tables"]) == (True, True)
    assert left["refused"] != "accepted"


def test_a_model_of_real_size_needs_no_memory(answers: dict[str, Any]) -> None:
    """Qwen3-30B-A3B at TP 4: 18,867 tensors, 7.64 billion elements on a rank."""
    assert case(answers, "real size") == {"pieces": 18_867, "elements": 7_642_626_048}


def test_packed_weights_are_told_from_those_that_lie_as_traced(answers: dict[str, Any]) -> None:
    linear = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    packed, unpacked = case(answers, "packed"), case(answers, "unpacked")
    # Without AVX-512 vLLM has no kernels that want them packed, and leaves them as they are.
    assert {name.split(".")[-2] for name in packed["relaid"]} == (linear if look().avx512 else set())
    assert unpacked["relaid"] == []
    assert packed["tensors"] == unpacked["tensors"]


@pytest.mark.parametrize(
    "name",
    ["qwen2", "qwen3", "llama", "qwen3_moe", "qwen2 float32", "llama pp2 tp2", "qwen3_moe ep2"],
)
def test_ranks_of_all_sizes_are_brought_to_what_the_loader_would_have_made(answers: dict[str, Any], name: str) -> None:
    """Ranks of one, two and four from one store: fused, sharded, replicated and padded tensors, and experts."""
    answer = case(answers, f"live {name}")
    assert answer["different"] == []


def test_a_rank_of_four_needs_about_a_quarter_of_the_delta(answers: dict[str, Any]) -> None:
    answer = case(answers, "live llama")
    whole, *shares = answer["shares"]
    assert whole == answer["delta"]
    for two in shares[:2]:
        assert 0.45 < two / whole < 0.6
    for four in shares[2:]:
        assert 0.22 < four / whole < 0.35
