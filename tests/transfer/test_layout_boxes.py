from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import TransferError
from rose_transfer.layout import strided
from rose_transfer.layout.box import AXES_MAX, Box, row_major, subtract_all
from rose_transfer.layout.coverage import cover
from rose_transfer.layout.disjoint import are_disjoint
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
    assert (common is None) == (painted(shape, [one, other]).max(initial=0) < 2)
    assert not (one.elements and other.elements) or one.meets(other) == (common is not None)
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


@given(arrays_with_boxes(8))
def test_boxes_are_disjoint_if_none_is_painted_over(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert are_disjoint(boxes) == (painted(shape, boxes).max(initial=0) < 2)


@st.composite
def slices_of_slices(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """An array cut in places of one axis, its parts in places of any, and so on; a part may be left out."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(1, 4))):
        axis = draw(st.integers(0, len(shape) - 1))
        boxes = [part for box in boxes for part in cut(box, axis, draw(st.integers(1, 4)))]
    return shape, draw(st.permutations(boxes[draw(st.integers(0, 1)) :]))


def cut(box: Box, axis: int, most: int) -> list[Box]:
    rows = -(-box.sizes[axis] // most)
    return [
        Box(
            (*box.starts[:axis], box.starts[axis] + at, *box.starts[axis + 1 :]),
            (*box.sizes[:axis], min(rows, box.sizes[axis] - at), *box.sizes[axis + 1 :]),
        )
        for at in range(0, box.sizes[axis], rows)
    ]


@given(slices_of_slices(), st.data())
def test_slices_of_slices_are_disjoint_until_one_grows(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    assert are_disjoint(boxes)
    if not boxes:
        return
    at, axis = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    sizes = list(boxes[at].sizes)
    sizes[axis] = min(sizes[axis] + 1, shape[axis] - boxes[at].starts[axis])
    boxes[at] = Box(boxes[at].starts, tuple(sizes))
    assert are_disjoint(boxes) == (painted(shape, boxes).max() < 2)


def test_many_slices_take_a_few_looks_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a model, cut by ranks and then by buckets, in any order."""
    monkeypatch.setattr("rose_transfer.layout.disjoint.LOOKS_PER_BOX", 8)
    shape = (128, 1536, 4096)
    boxes = [box for whole in cut(Box.whole(shape), 2, 16) for box in cut(whole, 0, 128)]
    boxes = [part for box in boxes for part in cut(box, 1, 3)]
    assert len(boxes) == 6144
    random.Random(1).shuffle(boxes)
    assert are_disjoint(boxes)
    assert not are_disjoint([*boxes, Box((127, 1535, 4095), (1, 1, 1))])


def test_slices_may_be_cut_again_and_again() -> None:
    """In two at a random place, along one axis and then another, eleven times; all reach along a third."""
    drawn = random.Random(2)
    boxes = [Box.whole((4, 10**6, 10**6))]
    for level in range(11):
        boxes = [part for box in boxes for part in _in_two(box, 1 + level % 2, drawn)]
    assert len(boxes) == 2048
    drawn.shuffle(boxes)
    assert are_disjoint(boxes)
    assert not are_disjoint([*boxes, Box(boxes[0].starts, (1, 1, 1))])


def _in_two(box: Box, axis: int, drawn: random.Random) -> list[Box]:
    at = drawn.randint(box.sizes[axis] // 4, box.sizes[axis] // 2)
    first = Box(box.starts, (*box.sizes[:axis], at, *box.sizes[axis + 1 :]))
    return [first, *box.subtract(first)]


@given(st.data())
def test_any_twenty_boxes_can_be_told_apart(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=AXES_MAX, max_size=AXES_MAX)))
    boxes = data.draw(st.lists(boxes_in(shape), min_size=20, max_size=20))
    assert are_disjoint(boxes) == (painted(shape, boxes).max() < 2)


def test_twenty_steps_that_are_parted_one_by_one() -> None:
    """Each box lies along another side of what is left, so a look at all finds one."""
    left, boxes = Box.whole((400,) * AXES_MAX), []
    for step in range(19):
        axis = (-1 - step) % AXES_MAX
        rest = _without_first(left, axis)
        boxes += left.subtract(rest)
        left = rest
    assert len(boxes) == 19
    assert are_disjoint([*boxes, left])
    assert not are_disjoint([*boxes, left, Box(left.starts, (1,) * AXES_MAX)])


def _without_first(box: Box, axis: int) -> Box:
    starts, sizes = list(box.starts), list(box.sizes)
    starts[axis] += 1
    sizes[axis] -= 1
    return Box(tuple(starts), tuple(sizes))


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


def test_cells_follow_the_number_of_boxes() -> None:
    scattered = [Box((2 * i,) * 2, (1, 1)) for i in range(1000)]
    with pytest.raises(TransferError, match=r"1000 boxes cut .* into 2000 x 2000 cells") as told:
        cover((2000, 2000), scattered)
    assert "at most 1025024 cells" in str(told.value)
    assert cover((2000, 2000), scattered[:100]).most == 1
    with pytest.raises(TransferError, match="9 axes"):
        cover((1,) * 9, [Box.whole((1,) * 9)])


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
