from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import TransferError
from rose_transfer.layout import strided
from rose_transfer.layout.box import Box, row_major, subtract_all
from rose_transfer.layout.coverage import cover
from rose_transfer.layout.strided import View, box_copies, view_boxes

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(starts, tuple(draw(st.integers(0, size - start)) for start, size in zip(starts, shape, strict=True)))


@st.composite
def arrays_with_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), min_size=2, max_size=count))


def painted(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))] += 1
    return counts


@given(arrays_with_boxes(2))
def test_intersection_and_difference_split_a_box_exactly(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (one, other) = case[0], case[1][:2]
    common = one.intersect(other)
    parts = [*one.subtract(other), *([common] if common else [])]
    assert (painted(shape, parts) == painted(shape, [one])).all()
    assert all(part.intersect(other) is None for part in one.subtract(other))


@given(arrays_with_boxes(6))
def test_coverage_counts_as_painting_does(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    counts = painted(shape, boxes)
    coverage = cover(shape, boxes)
    rebuilt = np.zeros(shape, dtype=np.int64)
    for cell in coverage.cells(coverage.counts >= 0):
        rebuilt[tuple(slice(a, b) for a, b in zip(cell.starts, cell.ends, strict=True))] = coverage.counts[
            tuple(int(np.searchsorted(e, s)) for e, s in zip(coverage.edges, cell.starts, strict=True))
        ]
    assert (rebuilt == counts).all()
    assert coverage.most == counts.max(initial=0)
    assert coverage.fewest == (counts.min() if counts.size else 0)


@given(arrays_with_boxes(5))
def test_subtracting_many_leaves_what_none_holds(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (first, *holes) = case
    left = subtract_all([first], holes)
    expected = (painted(shape, [first]) == 1) & (painted(shape, holes) == 0)
    assert (painted(shape, left) == expected).all()


def test_a_scalar_is_a_box_of_one_element() -> None:
    coverage = cover((), [Box((), ()), Box((), ())])
    assert (coverage.fewest, coverage.most) == (2, 2)
    assert Box((), ()).subtract(Box((), ())) == []


def test_scattered_boxes_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_transfer.layout.coverage.CELLS_MAX", 8)
    with pytest.raises(TransferError, match="cells"):
        cover((9, 9), [Box((i, i), (1, 1)) for i in range(9)])


@st.composite
def views_of_views(draw: st.DrawFn) -> tuple[tuple[int, ...], View, np.ndarray]:
    """A view of a numbered array by operations that loaders use, next to what NumPy makes of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    array = np.arange(math.prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        if array.ndim == 0:
            break
        axis = draw(st.integers(0, array.ndim - 1))
        match draw(st.sampled_from(["narrow", "select", "transpose", "step", "unflatten", "add axis"])):
            case "narrow":
                start = draw(st.integers(0, array.shape[axis] - 1))
                stop = draw(st.integers(start + 1, array.shape[axis]))
                array = array[(slice(None),) * axis + (slice(start, stop),)]
            case "select":
                array = array[(slice(None),) * axis + (draw(st.integers(0, array.shape[axis] - 1)),)]
            case "transpose":
                array = np.moveaxis(array, axis, draw(st.integers(0, array.ndim - 1)))
            case "step":
                array = array[(slice(None),) * axis + (slice(None, None, 2),)]
            case "unflatten":
                if array.shape[axis] % 2 == 0 and array.flags.c_contiguous:
                    array = array.reshape((*array.shape[:axis], 2, -1, *array.shape[axis + 1 :]))
            case "add axis":
                array = np.expand_dims(array, axis)
    # NumPy may keep any stride for an axis of one element, as torch does.
    offset = int(array.reshape(-1)[0])
    return shape, View(offset, array.shape, tuple(stride // array.itemsize for stride in array.strides)), array


@given(views_of_views(), views_of_views())
def test_a_copy_between_views_is_cut_into_boxes_without_change(
    one: tuple[tuple[int, ...], View, np.ndarray], other: tuple[tuple[int, ...], View, np.ndarray]
) -> None:
    (source_shape, source, taken), (shape, view, _) = one, other
    if source.sizes != view.sizes:
        # Give the destination the sizes of the source, permuted memory and a margin.
        shape = (math.prod(source.sizes) + 3,)
        view = View(2, source.sizes, row_major(source.sizes[::-1])[::-1])
    memory = np.full(math.prod(shape), -1)
    expected = memory.copy()
    byte_strides = tuple(stride * 8 for stride in view.strides)
    np.lib.stride_tricks.as_strided(expected[view.offset :], view.sizes, byte_strides)[...] = taken
    whole = np.arange(math.prod(source_shape)).reshape(source_shape)
    for copy in box_copies(source_shape, source, shape, view):
        inside = tuple(slice(a, b) for a, b in zip(copy.source.starts, copy.source.ends, strict=True))
        byte_strides = tuple(stride * 8 for stride in copy.strides)
        np.lib.stride_tricks.as_strided(memory[copy.offset :], copy.source.sizes, byte_strides)[...] = whole[inside]
        assert copy.destination.elements == copy.source.elements
    assert (memory == expected).all()


def test_rows_of_a_fused_matrix_stay_one_box() -> None:
    copies = box_copies((4, 6, 8), View(2 * 48, (6, 8), (8, 1)), (12, 8), View(48, (6, 8), (8, 1)))
    assert [(copy.source, copy.destination) for copy in copies] == [(Box((2, 0, 0), (1, 6, 8)), Box((6, 0), (6, 8)))]


def test_a_transpose_stays_one_box() -> None:
    copies = box_copies((6, 8), View(0, (8, 6), (1, 8)), (8, 6), View.whole((8, 6)))
    assert [(copy.source, copy.strides) for copy in copies] == [(Box((0, 0), (6, 8)), (1, 6))]


@pytest.mark.parametrize("count", [6, 10])
def test_a_flat_view_that_crosses_rows_is_cut_into_boxes(count: int) -> None:
    boxes = view_boxes((4, 5), View(3, (count,), (1,)))
    assert painted((4, 5), boxes).reshape(-1).tolist() == [0] * 3 + [1] * count + [0] * (17 - count)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(0, (3,), (0,)), "strides"),
        (View(4, (3,), (1,)), "over elements"),
        (View(-1, (2,), (1,)), "over elements"),
        (View(3, (2,), (-1,)), "strides"),
    ],
)
def test_views_that_repeat_or_leave_the_array_are_refused(view: View, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        view_boxes((6,), view)


def test_unequal_views_are_refused() -> None:
    with pytest.raises(TransferError, match="sizes"):
        box_copies((6,), View.whole((6,)), (2, 3), View.whole((2, 3)))


def test_interleaving_by_single_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "PIECES_MAX", 4)
    assert len(view_boxes((8,), View(0, (4,), (2,)))) == 4
    with pytest.raises(TransferError, match="more than 4 boxes"):
        view_boxes((10,), View(0, (5,), (2,)))
