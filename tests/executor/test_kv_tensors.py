"""Where blocks lie in tensors, and which whole pages are theirs alone."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import EngineError
from rose_executor.kv_tensors import (
    KvMemory,
    Lane,
    find_kv_memory,
    give_back_runs,
    joined,
    lanes_of,
    memory_of,
    runs_of,
    whole_pages,
)
from rose_executor.kv_untouched import Untouched

PAGE = mmap.PAGESIZE


@given(st.sets(st.integers(0, 60)))
def test_runs_hold_the_same_blocks_and_no_two_touch(blocks: set[int]) -> None:
    runs = runs_of(blocks)
    assert [block for first, count in runs for block in range(first, first + count)] == sorted(blocks)
    assert all(first + count < after for (first, count), (after, _) in itertools.pairwise(runs))


def lanes(tensor: torch.Tensor, blocks: int) -> list[Lane]:
    item = tensor.element_size()
    return lanes_of(tensor.data_ptr(), tensor.shape, [stride * item for stride in tensor.stride()], item, blocks)


def test_contiguous_blocks_are_one_lane() -> None:
    tensor = torch.zeros(7, 2, 4, 8)
    assert lanes(tensor, 7) == [Lane(tensor.data_ptr(), 256, 256)]


def test_keys_and_values_apart_are_two_lanes() -> None:
    tensor = torch.zeros(2, 7, 4, 8)
    assert lanes(tensor, 7) == [Lane(tensor.data_ptr(), 128, 128), Lane(tensor.data_ptr() + 7 * 128, 128, 128)]


def test_layers_of_one_block_side_by_side_become_one_lane_together() -> None:
    buffer = torch.zeros(7, 3, 32)
    apart = [lane for layer in range(3) for lane in lanes(buffer[:, layer], 7)]
    assert joined([*apart, apart[0]]) == [Lane(buffer.data_ptr(), 384, 384)]


def test_a_permuted_view_lies_where_its_tensor_does() -> None:
    tensor = torch.zeros(7, 2, 4, 8)
    assert lanes(tensor.permute(0, 2, 1, 3), 7) == lanes(tensor, 7)


@pytest.mark.parametrize("shape", [(2, 4, 8), (7, 7, 4), (14, 4)])
def test_a_dimension_of_blocks_in_doubt_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="does not show where its 7 blocks are"):
        lanes(torch.zeros(shape), 7)


def test_an_engine_without_keys_and_values_is_refused() -> None:
    with pytest.raises(EngineError, match="no keys and values"):
        memory_of([], 7)


@given(
    base=st.integers(0, 3 * PAGE),
    length=st.integers(1, 3 * PAGE),
    gap=st.integers(0, PAGE),
    given_back=st.sets(st.integers(0, 11)),
)
def test_no_page_that_goes_back_holds_a_byte_of_another_block(
    base: int, length: int, gap: int, given_back: set[int]
) -> None:
    lane = Lane(base, length + gap, length)
    gone = {
        byte // PAGE
        for address, size in whole_pages([lane], runs_of(given_back))
        for byte in range(address, address + size, PAGE)
    }
    assert all(address % PAGE == size % PAGE == 0 for address, size in whole_pages([lane], runs_of(given_back)))
    for block in set(range(12)) - given_back:
        start = base + block * lane.stride
        assert gone.isdisjoint(range(start // PAGE, (start + length - 1) // PAGE + 1))
    for block in given_back:
        start = base + block * lane.stride
        inside = range(-(-start // PAGE), (start + length) // PAGE)
        assert gone.issuperset(inside)


def resident_pages(base: int, pages: int) -> int:
    """How many of the pages from an address on are there, by the kernel's books."""
    told = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(base), ctypes.c_size_t(pages * PAGE), told) == 0
    return sum(page & 1 for page in told)


def test_pages_really_go_back_and_are_fresh_when_they_are_touched_again() -> None:
    mapping = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(mapping, dtype=torch.int8).view(16, 4 * PAGE)
    tensor.fill_(3)
    base = tensor.data_ptr()
    guarded = memory_of([tensor], 16)
    assert guarded.block_bytes == 4 * PAGE
    assert resident_pages(base, 64) == 64
    assert guarded.give_back([(2, 3), (9, 1)]) == 16 * PAGE
    assert resident_pages(base, 64) == 48
    assert [int(row[0]) for row in tensor] == [0 if block in (2, 3, 4, 9) else 3 for block in range(16)]


def test_what_the_kernel_refuses_is_told() -> None:
    with pytest.raises(EngineError, match="the kernel keeps pages"):
        KvMemory(1, (Lane(0, PAGE, PAGE),)).give_back([(2**40, 1)])


def test_a_worker_is_asked_in_words() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[torch.zeros(5, PAGE)]))
    assert find_kv_memory(worker, 5) == (4 * PAGE, "")
    assert give_back_runs(worker, [(1, 2)]) == ""
    assert find_kv_memory(worker, 6) == (
        0,
        "a tensor of keys and values of shape (5, 4096) does not show where its 6 blocks are",
    )


def test_large_zeros_begin_without_pages_and_all_else_is_torchs_own() -> None:
    with Untouched():
        large = torch.zeros(64 * PAGE * 8, dtype=torch.int8, device="cpu")
        small = torch.zeros(8, dtype=torch.int8)
        floats = torch.zeros((1024, 1024))
    assert resident_pages(large.data_ptr(), 64 * 8) == 0
    large[: 3 * PAGE].fill_(1)
    assert resident_pages(large.data_ptr(), 64 * 8) < 64 * 8
    assert (int(large.sum()), int(small.sum()), int(floats.sum())) == (3 * PAGE, 0, 0)
