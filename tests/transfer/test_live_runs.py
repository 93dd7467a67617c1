"""Every element of a bucket is reached in local memory once, by whatever run its tile belongs to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_tools import inside
from live_tools import rank_layout

from rose.errors import TransferError
from rose_transfer.codec import TILE_ELEMENTS
from rose_transfer.codec.streams import tile_count
from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.live.held import held_buckets
from rose_transfer.live.runs import CopiedRun, DirectRun, flat_boxes, tile_runs
from rose_transfer.store.packing import pack_for, pack_regions, pack_whole

SIZES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SIZES, st.data())
def test_flat_boxes_hold_exactly_the_range(sizes: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(sizes)
    boxes = list(flat_boxes(sizes, start, end))
    found = [numbers[inside(box)].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_runs_reach_each_element_of_each_tile(size: int, plain: bool, twice: bool) -> None:
    ranks = [rank_layout(rank, size, twice=twice) for rank in range(size)]
    packing = pack_for(ranks)
    directs = 0
    for layout in ranks:
        written = {name: np.zeros(math.prod(tensor.shape), int) for name, tensor in layout.tensors.items()}
        for held in held_buckets(packing, layout):
            runs = tile_runs(held, lambda _: plain)
            assert [run.first for run in runs] == [0, *(run.end for run in runs[:-1])]
            assert runs[-1].end == tile_count(held.bucket.elements)
            for run in runs:
                if isinstance(run, DirectRun):
                    directs += 1
                    elements = min(run.end * TILE_ELEMENTS, held.bucket.elements) - run.first * TILE_ELEMENTS
                    written[run.tensor][run.offset : run.offset + elements] += 1
                    continue
                in_run = np.zeros(run.elements, int)
                for copy in run.copies:
                    for memory, view in ((in_run, copy.within_run), (written[copy.tensor], copy.local)):
                        steps = tuple(8 * stride for stride in view.strides)
                        np.lib.stride_tricks.as_strided(memory[view.offset :], view.sizes, steps)[...] += 1
                assert in_run.min() == 1
        for name, counts in written.items():
            padded = counts.reshape(layout.tensors[name].shape)
            for pad in layout.pads:
                if pad.tensor == name:
                    assert not padded[inside(pad.box)].any()
                    padded[inside(pad.box)] = 1
            assert (counts == 1).all(), name
    assert (directs > 0) == plain


def test_a_large_tensor_lies_directly_but_for_its_edges() -> None:
    shape = (1000, 700)
    parameters = {"a": Parameter((9,), "bfloat16"), "b": Parameter(shape, "bfloat16"), "c": Parameter((5,), "bfloat16")}
    layout = Layout(
        "rank",
        parameters,
        {name: LocalTensor(value.shape, value.dtype) for name, value in parameters.items()},
        (
            Piece("a", Box.whole((9,)), "a", 0, (1,)),
            Piece("b", Box.whole(shape), "b", 0, (700, 1)),
            Piece("c", Box.whole((5,)), "c", 0, (1,)),
        ),
    )
    (held,) = held_buckets(pack_whole(parameters), layout)
    first, direct, last = tile_runs(held, lambda _: True)
    assert (isinstance(first, CopiedRun), first.first, first.end) == (True, 0, 1)
    assert direct == DirectRun(1, 10, "b", TILE_ELEMENTS - 9)
    assert (isinstance(last, CopiedRun), last.first, last.end) == (True, 10, 11)


def test_a_version_without_a_parameter_is_refused() -> None:
    layout = rank_layout()
    whole = pack_for([layout])
    regions = [region for bucket in whole.buckets for region in bucket.regions if region.parameter != "up"]
    with pytest.raises(TransferError, match=r"holds up\[0:1536, 0:96\], of which 147456 elements are in no bucket"):
        held_buckets(pack_regions(whole.parameters, {"all": regions}), layout)
    parameters = {name: value for name, value in whole.parameters.items() if name != "up"}
    with pytest.raises(TransferError, match=r"needs up of shape \(1536, 96\); the version has none"):
        held_buckets(pack_regions(parameters, {"all": regions}), layout)
