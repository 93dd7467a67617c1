"""Buckets hold every element once, in the same places every time, and give back the bits that went in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_tools import rank_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rose.errors import TransferError
from rose_transfer.layout.box import Box
from rose_transfer.layout.coverage import cover
from rose_transfer.layout.holdings import Region
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.store import packing as packing_module
from rose_transfer.store.buckets import pack, state_parameters, unpack
from rose_transfer.store.canonical import MalformedRecord
from rose_transfer.store.packing import BucketId, Packing, pack_for, pack_regions, pack_whole

DTYPES = ("bfloat16", "float16", "float32")


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Parameter], int]:
    """Parameters of any rank, scalars and empty ones too, and a bucket size from one element up."""
    shapes = st.lists(st.integers(0, 7) | st.just(1), max_size=4).map(tuple)
    parameters = draw(
        st.dictionaries(st.text("abc.é", max_size=4), st.builds(Parameter, shapes, st.sampled_from(DTYPES)), max_size=5)
    )
    return parameters, draw(st.sampled_from([4, 6, 10, 64, 300, 2**26]))


@settings(max_examples=150, deadline=None)
@given(models())
def test_every_element_lies_in_one_place_and_in_one_piece(model: tuple[dict[str, Parameter], int]) -> None:
    parameters, bucket_bytes = model
    packed = pack_whole(parameters, bucket_bytes)
    assert all(0 < bucket.dense_bytes <= bucket_bytes for bucket in packed.buckets)
    assert [bucket.bucket_id for bucket in packed.buckets] == [BucketId("all", i) for i in range(len(packed.buckets))]
    for name, parameter in parameters.items():
        numbers = np.arange(np.prod(parameter.shape, dtype=int)).reshape(parameter.shape)
        regions = [region for bucket in packed.buckets for region in bucket.regions if region.parameter == name]
        if numbers.size:
            counts = cover(parameter.shape, [region.box for region in regions])
            assert (counts.fewest, counts.most) == (1, 1)
        parts = [numbers[tuple(map(slice, r.box.starts, r.box.ends))].reshape(-1) for r in regions]
        assert np.concatenate([np.empty(0, int), *parts]).tolist() == list(range(numbers.size)), "in order"
    assert packing_module.from_bytes(packed.to_bytes()) == packed
    shuffled = dict(reversed(parameters.items()))
    assert pack_whole(shuffled, bucket_bytes).to_bytes() == packed.to_bytes()


@settings(max_examples=80, deadline=None)
@given(models(), st.integers(0, 2**32))
def test_any_bits_come_back(model: tuple[dict[str, Parameter], int], seed: int) -> None:
    """NaN payloads, infinities, denormals and negative zero in all dtypes."""
    parameters, bucket_bytes = model
    rng = np.random.default_rng(seed)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        size = int(np.prod(parameter.shape, dtype=int)) * packing_module.LANE_BYTES[parameter.dtype]
        state[name] = torch.empty(parameter.shape, dtype=getattr(torch, parameter.dtype))
        if size:
            state[name].view(-1).view(torch.uint8)[:] = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    packed = pack_whole(parameters, bucket_bytes)
    buckets = list(pack(packed, state))
    assert [(bits.size, bits.itemsize) for bits in buckets] == [(one.elements, one.lane) for one in packed.buckets]
    back = unpack(packed, buckets)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert (back[name].shape, back[name].dtype) == (tensor.shape, tensor.dtype)
        assert back[name].numel() == 0 or back[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))


def test_full_buckets_hold_whole_rows() -> None:
    packed = pack_whole({"a": Parameter((10, 3), "bfloat16"), "b": Parameter((4,), "bfloat16")}, 32)
    assert [[str(region.box) for region in bucket.regions] for bucket in packed.buckets] == [
        ["[0:5, 0:3]"],
        ["[5:10, 0:3]", "[0:1]"],
        ["[1:4]"],
    ]


def test_shard_classes_have_buckets_of_their_own_and_dtypes_too() -> None:
    parameters = {"a": Parameter((4, 4), "bfloat16"), "router": Parameter((4,), "float32")}
    halves = {f"tp {rank}": [Region("a", Box((0, 2 * rank), (4, 2)))] for rank in range(2)}
    packed = pack_regions(parameters, {**halves, "every": [Region("router", Box.whole((4,)))]})
    assert [(str(one.bucket_id), one.dtype, one.elements) for one in packed.buckets] == [
        ("every/0", "float32", 4),
        ("tp 0/0", "bfloat16", 8),
        ("tp 1/0", "bfloat16", 8),
    ]
    state = {"a": torch.arange(16.0).view(4, 4), "router": torch.full((4,), 1e-9)}
    buckets = list(pack(packed, state))
    assert (
        buckets[1].view("<u2").tolist()
        == torch.tensor([0, 1, 4, 5, 8, 9, 12, 13.0]).bfloat16().view(torch.int16).tolist()
    )
    back = unpack(packed, buckets)
    assert back["a"].equal(state["a"].bfloat16())
    assert back["router"].equal(state["router"])


def test_receivers_that_mean_another_model_have_no_common_packing() -> None:
    whole = (Piece("a", Box.whole((2,)), "a", 0, (1,)),)
    of_one, of_other = (
        Layout("rank 0", {"a": Parameter((2,), dtype)}, {"a": LocalTensor((2,), dtype)}, whole)
        for dtype in ("bfloat16", "float32")
    )
    assert [bucket.dtype for bucket in pack_for([of_one, of_one]).buckets] == ["bfloat16"]
    with pytest.raises(TransferError, match=r"float32.*bfloat16.*folder of their own"):
        pack_for([of_one, of_other])


def test_a_packing_may_hold_a_part_but_is_not_unpacked_then() -> None:
    packed = pack_regions({"a": Parameter((4, 4), "bfloat16")}, {"tp 0": [Region("a", Box((0, 0), (4, 2)))]})
    with pytest.raises(TransferError, match="only a part of a"):
        unpack(packed, pack(packed, {"a": torch.zeros(4, 4)}))


def test_a_tied_tensor_is_packed_once_and_one_stored_twice_twice() -> None:
    embed = torch.randn(6, 4)
    state = {"embed": embed, "head": embed, "copy": embed.clone(), "part": embed[:3]}
    parameters = state_parameters(state)
    assert list(parameters) == ["embed", "copy", "part"]
    back = unpack(pack_whole(parameters), pack(pack_whole(parameters), state))
    assert back["embed"].equal(embed)
    assert "head" not in back
    assert state_parameters({"a": torch.empty(0), "b": torch.empty(0)}).keys() == {"a", "b"}
    with pytest.raises(TransferError, match="int64"):
        state_parameters({"steps": torch.zeros(3, dtype=torch.int64)})


class _Made(Mapping[str, torch.Tensor]):
    """A state dict of a trainer that has no room for the model in a second dtype: it casts what is asked for."""

    def __init__(self, masters: dict[str, torch.Tensor]) -> None:
        self._masters = masters

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._masters[name].to(torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)


def test_tensors_made_when_they_are_asked_for_are_not_taken_for_one_another() -> None:
    masters = {f"layer {number}": torch.randn(256, 256) for number in range(12)}
    packing = pack_whole(state_parameters(_Made(masters)))
    back = unpack(packing, pack(packing, _Made(masters)))
    assert {name: back[name].equal(tensor.bfloat16()) for name, tensor in masters.items()} == dict.fromkeys(
        masters, True
    )


def test_tensors_without_memory_are_not_taken_for_one_another() -> None:
    state = {name: torch.empty(4, 4, device="meta") for name in ("a", "b")}
    parameters = state_parameters(state)
    assert parameters.keys() == {"a", "b"}
    with pytest.raises(TransferError, match="a is on the meta device"):
        list(pack(pack_whole(parameters), state))


def test_tensors_in_pieces_are_packed_whole_but_not_by_one_process() -> None:
    """Two layers of one shape, and a tied head: the pieces are told apart by the memory of this rank."""
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        layers = {name: distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]) for name in ("first", "second")}
        state = {**layers, "head": layers["first"]}
        parameters = state_parameters(state)
        assert parameters == dict.fromkeys(("first", "second"), Parameter((8, 4), "float32"))
        with pytest.raises(TransferError, match=r"in pieces over the ranks of a DTensor.*ShardedPublisher"):
            list(pack(pack_whole(parameters), state))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((4, 4), np.float32), "a is of type ndarray; expected a torch.Tensor"),
        (torch.eye(4).to_sparse(), "a has the layout torch.sparse_coo; expected a dense tensor"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(TransferError, match=re.escape(said)):
        state_parameters({"a": value})
    with pytest.raises(TransferError, match=re.escape(said)):
        list(pack(pack_whole({"a": Parameter((4, 4), "float32")}), {"a": value}))


def test_masters_are_rounded_and_strides_do_not_matter() -> None:
    masters = torch.randn(8, 6)
    packed = pack_whole({"a": Parameter((6, 8), "bfloat16")}, 40)
    back = unpack(packed, pack(packed, {"a": masters.T}))
    assert back["a"].equal(masters.T.bfloat16())


def test_a_bucket_is_no_view_of_the_weights() -> None:
    weights = torch.zeros(4, dtype=torch.bfloat16)
    packed = pack_whole(state_parameters({"a": weights}))
    (bits,) = pack(packed, {"a": weights})
    weights += 1
    assert not bits.any()


@pytest.mark.parametrize(
    ("state", "says"), [({}, "have no a"), ({"a": torch.zeros(3, 2)}, "shape"), ({"a": torch.zeros(())}, "shape")]
)
def test_wrong_weights_are_named(state: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(TransferError, match=says):
        list(pack(pack_whole({"a": Parameter((2, 3), "float32")}), state))


def test_wrong_buckets_are_named() -> None:
    packed = pack_whole({"a": Parameter((2, 3), "float32")})
    with pytest.raises(TransferError, match="all/0 has 5 elements"):
        unpack(packed, [np.zeros(5, np.uint32)])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.update(layout=2),
        lambda value: value.update(more=1),
        lambda value: value["parameters"].update(a=["int8", [4, 4]]),
        lambda value: value["parameters"].update(a=["bfloat16", [4, 3]]),
        lambda value: value["parameters"].update(a=["bfloat16", [4, -4]]),
        lambda value: value["parameters"].pop("a"),
        lambda value: value["buckets"].pop(0),
        lambda value: value["buckets"].append(value["buckets"][0]),
        lambda value: value["buckets"][0].__setitem__(1, 1),
        lambda value: value["buckets"][0].__setitem__(2, "float32"),
        lambda value: value["buckets"][0][3].clear(),
        lambda value: value["buckets"][0][3].append(value["buckets"][0][3][0]),
        lambda value: value["buckets"][0][3][0].__setitem__(1, [1, 0]),
        lambda value: value["buckets"][0][3][0].__setitem__(2, [0, 4]),
        lambda value: value["buckets"][0][3][0].__setitem__(2, [10**9, 10**9]),
        lambda value: value["buckets"][1][3][0].__setitem__(1, [0, 0]),
    ],
)
def test_a_packing_from_the_network_is_checked(spoil: Callable[[Any], None]) -> None:
    packed = pack_whole({"a": Parameter((4, 4), "bfloat16")}, 16)
    value = json.loads(packed.to_bytes())
    spoil(value)
    with pytest.raises(MalformedRecord):
        packing_module.from_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def mixture_of_experts() -> dict[str, Parameter]:
    """The parameters of Qwen3-235B-A22B: 94 layers of 128 experts, 36,944 tensors."""
    width = 4096
    layer = {
        **{f"self_attn.{name}_proj": (rows, width) for name, rows in {"q": 8192, "k": 512, "v": 512}.items()},
        "self_attn.o_proj": (width, 8192),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (128,)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,)),
        "mlp.gate": (128, width),
        **{f"mlp.experts.{n}.{name}_proj": (1536, width) for n in range(128) for name in ("gate", "up")},
        **{f"mlp.experts.{n}.down_proj": (width, 1536) for n in range(128)},
    }
    shapes = {f"model.layers.{n}.{name}.weight": shape for n in range(94) for name, shape in layer.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (151936, width))
    return {name: Parameter(shape, "bfloat16") for name, shape in {**shapes, "model.norm.weight": (width,)}.items()}


def test_a_large_mixture_of_experts_cut_for_eight_ranks_takes_half_of_what_a_packing_may() -> None:
    parameters = mixture_of_experts()
    assert sum(np.prod(value.shape) for value in parameters.values()) > 235e9
    cut = {
        f"rank-{rank}": [
            Region(
                name,
                Box(
                    (rank * value.shape[0] // 8, *(0,) * (len(value.shape) - 1)),
                    (value.shape[0] // 8, *value.shape[1:]),
                ),
            )
            for name, value in parameters.items()
        ]
        for rank in range(8)
    }
    packed = pack_regions(parameters, cut)
    text = packed.to_bytes()
    assert len(text) <= packing_module.TEXT.bytes_max / 2
    assert sum(map(text.count, (b",", b"[", b"{"))) <= 0.55 * packing_module.TEXT.values_max
    assert packing_module.from_bytes(text) == packed


def test_what_is_no_packing() -> None:
    parameters = {"a": Parameter((4, 4), "bfloat16")}
    part, overlapping = Region("a", Box((0, 0), (2, 4))), Region("a", Box((1, 0), (2, 4)))
    with pytest.raises(ValueError, match="two places"):
        pack_regions(parameters, {"one": [part], "other": [overlapping]})
    with pytest.raises(ValueError, match="lies outside"):
        pack_regions(parameters, {"one": [Region("a", Box((3, 0), (2, 4)))]})
    with pytest.raises(ValueError, match="int8"):
        pack_whole({"a": Parameter((4,), "int8")})
    two = pack_regions(parameters, {"one": [part], "other": [Region("a", Box((2, 0), (2, 4)))]})
    for buckets in (two.buckets[::-1], two.buckets[:1] * 2):
        with pytest.raises(ValueError, match="out of its order"):
            Packing(parameters, buckets)
    assert Packing({}, ()).dense_bytes == 0
