"""Who owns a bucket and who sends what of it; what ranks agree on before they publish."""

from __future__ import annotations

import itertools
from dataclasses import replace

import layout_tools as tools
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import TransferError
from rose_transfer.layout.box import Box, row_major
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.layout.plan import plan
from rose_transfer.layout.sources import Sources
from rose_transfer.sharded.agreement import Agreed, Call, agree
from rose_transfer.sharded.pieces import lay
from rose_transfer.sharded.routes import Routes, bucket_layout, choose_owners, make_routes, pieces_bytes, plan_own
from rose_transfer.store.packing import pack_whole

SHAPES = {"a": (13, 6), "b": (5,), "c": (2, 3, 4), "d": ()}
MODEL = {name: Parameter(shape, "float32") for name, shape in SHAPES.items()}
PACKING = pack_whole(MODEL, bucket_bytes=80)


@st.composite
def trainers(draw: st.DrawFn) -> list[Layout]:
    """1 to 5 ranks; each parameter is cut along some axis at random places, and each part is at one rank or more."""
    ranks = draw(st.integers(1, 5))
    held: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for name, shape in SHAPES.items():
        axis = draw(st.integers(0, len(shape) - 1)) if shape else None
        cuts = sorted(draw(st.sets(st.integers(1, shape[axis] - 1), max_size=4))) if axis is not None else []
        edges = [0, *cuts, shape[axis] if axis is not None else 1]
        for start, end in itertools.pairwise(edges):
            starts, sizes = [0] * len(shape), list(shape)
            if axis is not None:
                starts[axis], sizes[axis] = start, end - start
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((name, Box(tuple(starts), tuple(sizes))))
    return [_rank(rank, boxes) for rank, boxes in enumerate(held)]


def _rank(rank: int, boxes: list[tuple[str, Box]]) -> Layout:
    tensors = {f"{name}{box}": LocalTensor(box.sizes, "float32") for name, box in boxes}
    pieces = tuple(Piece(name, box, f"{name}{box}", 0, row_major(box.sizes)) for name, box in boxes)
    return Layout(f"rank {rank}", MODEL, tensors, pieces)


def routes_of(layouts: list[Layout]) -> list[Routes]:
    """Those of every rank, each having planned its own and heard of the others."""
    plans = [plan_own(PACKING, layouts, rank) for rank in range(len(layouts))]
    told = [own.to_bytes(PACKING) for own in plans]
    return [make_routes(PACKING, own, rank, told) for rank, own in enumerate(plans)]


@given(trainers())
def test_every_bucket_comes_together_at_its_owner(layouts: list[Layout]) -> None:
    values = tools.tagged(MODEL)
    memories = [tools.memory_of(layout, values) for layout in layouts]
    routes = routes_of(layouts)
    assert len({one.owners for one in routes}) == len({one.rounds for one in routes}) == 1
    received = sorted(index for one in routes[0].rounds for index in one if index is not None)
    assert received == list(range(len(PACKING.buckets)))
    for index, bucket in enumerate(PACKING.buckets):
        bits = np.zeros(bucket.elements, dtype="<u4")
        owner = routes[0].owners[index]
        for sender, pieces in enumerate(routes[owner].incoming[index]):
            sent = routes[sender].outgoing[index]
            assert [one.box for one in sent] == [one.box for one in pieces]
            taken = [tools.window(memories[sender][one.tensor], one).reshape(-1) for one in sent]
            lay(bits, bucket, pieces, np.concatenate([*taken, []]).astype("<u4").view(np.uint8))
        wanted = [values[region.parameter][tools.inside(region.box)].reshape(-1) for region in bucket.regions]
        assert bits.tolist() == np.concatenate(wanted).tolist()


@given(trainers())
def test_no_rank_owns_more_than_its_share_and_a_bucket(layouts: list[Layout]) -> None:
    owners = choose_owners(PACKING, Sources(layouts))
    sizes = [bucket.dense_bytes for bucket in PACKING.buckets]
    for rank in range(len(layouts)):
        owned = [size for owner, size in zip(owners, sizes, strict=True) if owner == rank]
        assert sum(owned) <= sum(sizes) / len(layouts) + max(sizes)


def most_sent(routes: list[Routes]) -> int:
    """The most bytes that a rank sends in a round."""
    rounds = [[index for index in one if index is not None] for one in routes[0].rounds]
    return max(
        sum(pieces_bytes(mine.outgoing[index], PACKING.buckets[index]) for index in received)
        for mine in routes
        for received in rounds
    )


@given(trainers())
def test_no_rank_sends_more_than_two_buckets_in_a_round(layouts: list[Layout]) -> None:
    routes = routes_of(layouts)
    assert most_sent(routes) <= 2 * max(bucket.dense_bytes for bucket in PACKING.buckets)


def test_one_rank_that_holds_all_sends_it_in_many_rounds() -> None:
    empty = [_rank(rank, []) for rank in range(1, 6)]
    layouts = [replace(tools.whole_layout("", MODEL), holder="rank 0"), *empty]
    routes = routes_of(layouts)
    largest = max(bucket.dense_bytes for bucket in PACKING.buckets)
    assert largest < most_sent(routes) <= 2 * largest, "two at a time, where five could receive"
    received = sorted(index for one in routes[0].rounds for index in one if index is not None)
    assert received == list(range(len(PACKING.buckets)))


def test_what_the_owner_holds_is_not_sent() -> None:
    """Two ranks with the whole model: each owns half of the buckets, and takes them from itself."""
    layouts = [replace(tools.whole_layout("", MODEL), holder=f"rank {rank}") for rank in range(2)]
    routes = routes_of(layouts)[1]
    assert set(routes.owners) == {0, 1}
    for index, incoming in routes.incoming.items():
        assert incoming[0] == ()
        assert [one.box for one in incoming[1]] == [one.box for one in routes.outgoing[index]]
    assert all(not pieces for index, pieces in routes.outgoing.items() if routes.owners[index] == 0)


def test_the_rank_that_holds_most_of_a_bucket_owns_it() -> None:
    half = {0: ["a"], 1: ["b", "c", "d"]}
    layouts = [_rank(rank, [(name, Box.whole(SHAPES[name])) for name in names]) for rank, names in half.items()]
    owners = choose_owners(PACKING, Sources(layouts))
    for owner, bucket in zip(owners, PACKING.buckets, strict=True):
        of_a = sum(region.box.elements for region in bucket.regions if region.parameter == "a")
        if owner == 0:
            assert of_a > 0
    assert owners[0] == 0
    assert owners[-1] == 1


def test_near_sends_before_one_that_was_asked_for_less() -> None:
    layouts = [replace(tools.whole_layout("", MODEL), holder=f"rank {rank}") for rank in range(3)]
    for bucket in PACKING.buckets:
        made = plan(Sources(layouts), bucket_layout(PACKING, bucket), near="rank 2")
        assert {segment.holder for segment in made.segments} == {"rank 2"}


CALLS = [
    Call(7, "p", False, "l0", "f6", base=6, base_fingerprint="f6"),
    Call(7, "p", False, "l1", "f6"),
]


def test_calls_survive_the_way_to_the_other_ranks() -> None:
    assert [Call.from_bytes(call.to_bytes()) for call in CALLS] == CALLS


def test_ranks_that_hold_the_base_go_on_from_it() -> None:
    assert agree(CALLS, 0, ("l0", "l1")) == Agreed(base=6, plan=False, restore=False)


@pytest.mark.parametrize("held", [None, "f5"])
def test_a_rank_that_holds_something_else_has_all_get_the_base(held: str | None) -> None:
    calls = [CALLS[0], replace(CALLS[1], held=held)]
    assert agree(calls, 0, ("l0", "l1")) == Agreed(base=6, plan=False, restore=True)


def test_other_layouts_are_planned_anew_and_owners_get_the_base() -> None:
    assert agree(CALLS, 0, ()) == Agreed(base=6, plan=True, restore=True)


def test_without_a_base_nothing_is_restored() -> None:
    calls = [replace(CALLS[0], base=None, base_fingerprint=None), CALLS[1]]
    assert agree(calls, 0, ("l0", "l1")) == Agreed(base=None, plan=False, restore=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 8}, "rank 1 publishes version 8, rank 0 7"),
        ({"packing": "q"}, "rank 1 publishes the packing q, rank 0 p"),
        ({"compress": True}, "rank 1 publishes compress = True, rank 0 False"),
    ],
)
def test_ranks_that_mean_different_things_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        agree([CALLS[0], replace(CALLS[1], **change)], 0, ("l0", "l1"))
