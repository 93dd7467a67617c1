from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import layout_tools as tools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import TransferError
from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.holdings import Region, Replication, check_engine, replication, shard_classes
from rose_transfer.layout.layout import (
    Layout,
    LocalTensor,
    Pad,
    Parameter,
    Piece,
    check_destination,
    check_source,
)
from rose_transfer.layout.layout_json import fingerprint, from_json, to_json
from rose_transfer.layout.plan import Plan, Segment, plan, verify
from rose_transfer.layout.sources import Sources

models = st.dictionaries(
    st.sampled_from(["wte", "q", "norm", "router"]),
    st.lists(st.integers(0, 6), max_size=3).map(lambda shape: Parameter(tuple(shape), "bfloat16")),
    min_size=1,
)


@st.composite
def tilings(draw: st.DrawFn, box: Box) -> list[Box]:
    """Disjoint boxes that fill `box`, from random cuts."""
    axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
    if box.elements == 0:
        return []
    if not axes or draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.sizes[axis] - 1))
    low = Box(box.starts, (*box.sizes[:axis], at, *box.sizes[axis + 1 :]))
    start = box.starts[axis] + at
    high = Box(
        (*box.starts[:axis], start, *box.starts[axis + 1 :]),
        (*box.sizes[:axis], box.sizes[axis] - at, *box.sizes[axis + 1 :]),
    )
    return [*draw(tilings(low)), *draw(tilings(high))]


@st.composite
def placed(draw: st.DrawFn, holder: str, model: dict[str, Parameter], held: list[Region]) -> Layout:
    """A layout in which the regions lie one behind the other, axes in any order, with padding between."""
    pieces, pads, at = [], [], 0
    for region in draw(st.permutations(held)):
        order = draw(st.permutations(range(len(region.box.sizes))))
        packed = row_major(tuple(region.box.sizes[axis] for axis in order))
        strides = [0] * len(order)
        for axis, stride in zip(order, packed, strict=True):
            strides[axis] = stride if region.box.sizes[axis] > 1 else 0
        pieces.append(Piece(region.parameter, region.box, "memory", at, tuple(strides)))
        at += region.box.elements
        gap = draw(st.integers(0, 2))
        pads += [Pad("memory", Box((at,), (gap,)))] if gap else []
        at += gap
    return Layout(holder, model, {"memory": LocalTensor((at,), "float32")}, tuple(pieces), tuple(pads))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[dict[str, Parameter], list[Layout], Layout]:
    """A model that three senders hold with replicas, and one receiver of parts of it."""
    model = draw(models)
    shares: list[list[Region]] = [[], [], []]
    wanted: list[Region] = []
    for name, parameter in model.items():
        whole = Box.whole(parameter.shape)
        for box in draw(tilings(whole)):
            for place in draw(st.sets(st.integers(0, 2), min_size=1)):
                shares[place].append(Region(name, box))
        wanted += [Region(name, box) for box in draw(tilings(whole)) if draw(st.booleans())]
    senders = [draw(placed(f"trainer {place}", model, share)) for place, share in enumerate(shares)]
    return model, senders, draw(placed("engine-0 tp 0", model, wanted))


@settings(deadline=None)
@given(transfers())
def test_a_plan_moves_what_direct_slicing_would(case: tuple[dict[str, Parameter], list[Layout], Layout]) -> None:
    model, senders, receiver = case
    values = tools.tagged(model)
    memory = tools.zeroed(receiver)
    made = plan(Sources(senders), receiver)
    tools.execute(made, {sender.holder: tools.memory_of(sender, values) for sender in senders}, memory)
    assert (memory["memory"] == tools.memory_of(receiver, values)["memory"]).all()
    assert sum(segment.source.box.elements for segment in made.segments) == receiver.elements


@settings(deadline=None)
@given(transfers(), st.data())
def test_a_plan_with_any_one_segment_spoiled_is_refused(
    case: tuple[dict[str, Parameter], list[Layout], Layout], data: st.DataObject
) -> None:
    _, senders, receiver = case
    sources = Sources(senders)
    made = plan(sources, receiver)
    if not made.segments:
        return
    at = data.draw(st.integers(0, len(made.segments) - 1))
    segment = made.segments[at]
    source, goal = segment.source, segment.destination
    moved, misplaced = (dataclasses.replace(piece, offset=piece.offset + 1) for piece in (source, goal))
    spoiled = {
        "lost": (),
        "twice": (segment, segment),
        "shifted at the source": (Segment(segment.holder, moved, goal),),
        "shifted at the goal": (Segment(segment.holder, source, misplaced),),
        "another sender": (Segment("nobody", source, goal),),
        "another parameter": (Segment(segment.holder, dataclasses.replace(source, parameter="no such"), goal),),
    }
    put = spoiled[data.draw(st.sampled_from(sorted(spoiled)))]
    with pytest.raises(TransferError):
        verify(Plan(made.destination, (*made.segments[:at], *put, *made.segments[at + 1 :])), sources, receiver)


@settings(deadline=None)
@given(transfers(), st.randoms(use_true_random=False))
def test_text_and_fingerprint_do_not_depend_on_the_order_of_discovery(
    case: tuple[dict[str, Parameter], list[Layout], Layout], random: object
) -> None:
    _, _, receiver = case
    pieces, pads = list(receiver.pieces), list(receiver.pads)
    random.shuffle(pieces)  # type: ignore[attr-defined]
    random.shuffle(pads)  # type: ignore[attr-defined]
    other = dataclasses.replace(receiver, holder="engine-9 tp 0", pieces=tuple(pieces), pads=tuple(pads))
    assert fingerprint(other) == fingerprint(receiver)
    read = from_json(to_json(receiver))
    assert to_json(read) == to_json(receiver)
    assert (read.holder, set(read.pieces), set(read.pads)) == (
        receiver.holder,
        set(receiver.pieces),
        set(receiver.pads),
    )


@settings(deadline=None)
@given(transfers())
def test_classes_hold_each_element_once_and_name_all_its_holders(
    case: tuple[dict[str, Parameter], list[Layout], Layout],
) -> None:
    model, senders, receiver = case
    layouts = [*senders, receiver]
    holders: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for layout in layouts:
        for piece in layout.pieces:
            for index in _indices(piece.box):
                holders.setdefault((piece.parameter, index), set()).add(layout.holder)
    found: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for one in shard_classes(layouts):
        for region in one.regions:
            for index in _indices(region.box):
                assert found.setdefault((region.parameter, index), set(one.holders)) == set(one.holders)
        assert one.elements == sum(region.box.elements for region in one.regions)
    assert sum(one.elements for one in shard_classes(layouts)) == len(found)
    assert found == holders
    copies = replication(senders)
    for name, parameter in model.items():
        counts = [
            sum(piece.parameter == name and index in _indices(piece.box) for s in senders for piece in s.pieces)
            for index in _indices(Box.whole(parameter.shape))
        ]
        assert copies[name] == Replication(min(counts, default=0), max(counts, default=0))


def _indices(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, end) for start, end in zip(box.starts, box.ends, strict=True))))


MODEL = {"q": Parameter((4, 6), "bfloat16"), "norm": Parameter((6,), "float32")}
TRAINER = tools.whole_layout("trainer 0", MODEL)


def receiver(*pieces: Piece, pads: tuple[Pad, ...] = ()) -> Layout:
    """Rows 2 and 3 of q behind the norm, in a tensor of 4 x 6 whose last row is free."""
    return Layout("engine-0 tp 1", MODEL, {"qkv": LocalTensor((4, 6), "bfloat16")}, pieces, pads)


NORM = Piece("norm", Box((0,), (6,)), "qkv", 0, (1,))
ROWS = Piece("q", Box((2, 0), (2, 6)), "qkv", 6, (6, 1))
LAST_ROW = Pad("qkv", Box((3, 0), (1, 6)))


def test_declared_padding_is_never_written() -> None:
    made = plan(Sources([TRAINER]), receiver(NORM, ROWS, pads=(LAST_ROW,)))
    memory = tools.empty_memory(receiver())
    tools.execute(made, {"trainer 0": tools.memory_of(TRAINER, tools.tagged(MODEL))}, memory)
    assert (memory["qkv"][18:] == tools.UNWRITTEN).all()
    assert (memory["qkv"][:18] != tools.UNWRITTEN).all()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (receiver(NORM, ROWS), r"engine-0 tp 1: nothing is written to qkv\[3:4, 0:6\]"),
        (receiver(NORM, ROWS, ROWS, pads=(LAST_ROW,)), r"qkv\[1:3, 0:6\] is written more than once"),
        (
            receiver(NORM, dataclasses.replace(ROWS, offset=12), pads=(LAST_ROW, Pad("qkv", Box((1, 0), (1, 6))))),
            r"qkv\[3:4, 0:6\] is written although it is padding",
        ),
        (receiver(NORM, dataclasses.replace(ROWS, offset=20)), r"q\[2:4, 0:6\] in qkv: a view over elements 20 to 31"),
        (receiver(dataclasses.replace(NORM, tensor="kv")), "norm.* in kv: no such tensor"),
        (receiver(dataclasses.replace(NORM, parameter="v")), "v.* in qkv: no such parameter"),
        (receiver(dataclasses.replace(ROWS, box=Box((3, 0), (2, 6)))), r"q\[3:5, 0:6\] in qkv lies outside"),
        (receiver(dataclasses.replace(ROWS, box=Box((2, 0), (0, 6)))), r"q\[2:2, 0:6\] in qkv is empty"),
        (receiver(NORM, ROWS, pads=(Pad("qkv", Box((4, 0), (1, 6))),)), "padding .* lies outside"),
    ],
)
def test_faulty_receivers_are_refused_by_tensor_and_holder(layout: Layout, message: str) -> None:
    with pytest.raises(TransferError, match=message) as refused:
        plan(Sources([TRAINER]), layout)
    assert "engine-0 tp 1" in str(refused.value)
    with pytest.raises(TransferError, match=message):
        check_destination(layout)


def test_no_plan_is_returned_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_transfer.layout.plan._fill", lambda *_: [])
    with pytest.raises(TransferError, match="nothing is written to qkv"):
        plan(Sources([TRAINER]), receiver(NORM, ROWS, pads=(LAST_ROW,)))


def test_a_gap_between_the_senders_is_named() -> None:
    rows = Piece("q", Box((0, 0), (3, 6)), "q", 0, (6, 1))
    norm = Piece("norm", Box((0,), (6,)), "norm", 0, (1,))
    tensors = {"q": LocalTensor((3, 6), "float32"), "norm": LocalTensor((6,), "float32")}
    sources = Sources([Layout("trainer 0", MODEL, tensors, (rows, norm))])
    with pytest.raises(TransferError, match=r"no source holds q\[3:4, 0:6\], which engine-0 tp 1 needs for qkv"):
        plan(sources, receiver(NORM, ROWS, pads=(LAST_ROW,)))


def test_senders_that_describe_a_parameter_otherwise_are_refused() -> None:
    other = tools.whole_layout("trainer 1", MODEL | {"q": Parameter((4, 6), "float32")})
    with pytest.raises(TransferError, match=r"q is .*float32.* at trainer 1 and .*bfloat16.* at engine-0 tp 1"):
        plan(Sources([TRAINER, other]), receiver(NORM, ROWS, pads=(LAST_ROW,)))


def test_a_local_element_cannot_stand_for_two() -> None:
    tied = dataclasses.replace(TRAINER, pieces=(*TRAINER.pieces, Piece("norm", Box((0,), (6,)), "q", 0, (1,))))
    with pytest.raises(TransferError, match=r"trainer 0: q\[0:1, 0:6\] stands for more than one element"):
        check_source(tied)
    with pytest.raises(TransferError, match="stands for more than one"):
        Sources([tied])


def test_two_senders_of_one_name_are_refused() -> None:
    with pytest.raises(TransferError, match="two senders have one name"):
        Sources([TRAINER, TRAINER])


def test_replicas_share_the_sending() -> None:
    model = {f"layer {i}": Parameter((4,), "bfloat16") for i in range(8)}
    senders = [tools.whole_layout(f"trainer {place}", model) for place in range(4)]
    made = plan(Sources(senders), tools.whole_layout("engine-0", model))
    sent = Counter[str]()
    for segment in made.segments:
        sent[segment.holder] += segment.source.box.elements
    assert sent == {sender.holder: 8 for sender in senders}


def test_an_engine_that_lacks_a_part_of_a_parameter_is_refused() -> None:
    whole = tools.whole_layout("engine-0 tp 0", MODEL)
    assert check_engine([whole]) == ()
    assert check_engine([dataclasses.replace(whole, pieces=whole.pieces[:1])]) == ("norm",)
    with pytest.raises(TransferError, match="only a part of q is held"):
        check_engine([receiver(NORM, ROWS)])


def test_what_crosses_the_link_does_not_grow_with_replicas() -> None:
    def engine(replica: int, rank: int) -> Layout:
        rows = Piece("q", Box((2 * rank, 0), (2, 6)), "q", 0, (6, 1))
        tensors = {"q": LocalTensor((2, 6), "bfloat16"), "norm": LocalTensor((6,), "float32")}
        norm = dataclasses.replace(NORM, tensor="norm")
        return Layout(f"engine-{replica} tp {rank}", MODEL, tensors, (rows, norm))

    one = shard_classes([engine(0, rank) for rank in range(2)])
    eight = shard_classes([engine(replica, rank) for replica in range(8) for rank in range(2)])
    elements = math.prod(MODEL["q"].shape) + 6
    assert sum(one.elements for one in one) == sum(one.elements for one in eight) == elements
    assert sorted(len(found.holders) for found in eight) == [8, 8, 16]
    assert len({fingerprint(engine(replica, 1)) for replica in range(8)}) == 1


def test_holders_of_one_name_are_told_apart_by_what_they_hold() -> None:
    def engine(cut: int) -> list[Layout]:
        parts = ((0, cut), (cut, MODEL["q"].shape[0]))
        return [
            Layout(
                f"tp {rank}/2",
                MODEL,
                {"q": LocalTensor((end - start, 6), "bfloat16"), "norm": LocalTensor((6,), "float32")},
                (
                    Piece("q", Box((start, 0), (end - start, 6)), "q", 0, (6, 1)),
                    dataclasses.replace(NORM, tensor="norm"),
                ),
            )
            for rank, (start, end) in enumerate(parts)
        ]

    layouts = [*engine(2), *engine(3)]
    for found in shard_classes(layouts):
        for layout in layouts:
            held = layout.by_parameter()
            whole = [
                any(region.box.intersect(piece.box) == region.box for piece in held[region.parameter])
                for region in found.regions
            ]
            assert len(set(whole)) == 1, f"{layout.holder} holds a part of what others hold as a whole"
    assert shard_classes([*engine(2), *engine(2)]) == shard_classes(engine(2))
    assert [found.holders for found in shard_classes(engine(2))] == [("tp 0/2",), ("tp 0/2", "tp 1/2"), ("tp 1/2",)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        to_json(TRAINER).replace('"format":1', '"format":2'),
        to_json(TRAINER).replace("[0,0]", "[0,-1]"),
        to_json(TRAINER).replace("[0,0]", "[0]"),
        to_json(TRAINER).replace("[0,0]", "[0,0.5]"),
        to_json(TRAINER).replace("[0,0]", "0"),
        to_json(TRAINER).replace('"pads":[]', '"pads":[[1,[0],[0]]]'),
        to_json(TRAINER)[:-9],
    ],
)
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(TransferError, match="not the text of a layout"):
        from_json(text)
