"""Whatever the weights do, the version after the next one has room as well, where there is room for three models."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import changed, same, whole_files

from rose.simulator.small_model import PACKING, Bits, first_weights
from rose.waits import WaitBoard
from rose_transfer.distribution import WeightPublisher
from rose_transfer.store import NoRoomForVersion, Store
from rose_transfer.store.survey import verify
from rose_transfer.store.way_out import How, Rooms, how_to_store

WHOLE = 1000
MODEL_BYTES = sum(bits.nbytes for bits in first_weights(0))


@given(room=st.integers(2 * WHOLE, 6 * WHOLE), steps=st.lists(st.integers(1, 3 * WHOLE), max_size=60))
def test_the_rule_always_finds_room_and_leaves_as_much(room: int, steps: list[int]) -> None:
    newest = way = WHOLE
    for step in steps:
        rooms = Rooms(newest, way, WHOLE, room)
        assert rooms.has_way_out
        how = how_to_store(step, rooms)
        if how is How.STEPS:
            newest, way = newest + step, way + step
        elif how is How.RENEWED:
            assert way > WHOLE
            newest = way = WHOLE + step
        else:
            newest = way = WHOLE
        assert newest + WHOLE <= room


@given(
    rooms=st.builds(Rooms, *(st.integers(0, 4 * WHOLE) for _ in range(2)), st.just(WHOLE), st.integers(0, 6 * WHOLE)),
    step=st.integers(1, 2 * WHOLE),
)
def test_whole_is_written_only_where_that_helps(rooms: Rooms, step: int) -> None:
    how = how_to_store(step, rooms)
    if not rooms.has_way_out or rooms.newest + step + WHOLE <= rooms.room:
        assert how is How.STEPS
    elif how is not How.STEPS:
        assert rooms.room >= 2 * WHOLE


def test_a_version_is_not_renewed_where_the_way_that_there_is_is_shorter() -> None:
    """That one would be taken in its place, whatever its manifests take."""
    assert how_to_store(500, Rooms(newest=1100, way=900, whole=WHOLE, room=2500)) is How.WHOLE
    assert how_to_store(500, Rooms(newest=1100, way=1001, whole=WHOLE, room=2500)) is How.RENEWED


def publish(store: Store, version: int, weights: list[Bits]) -> None:
    """As a publisher does."""
    while True:
        try:
            store.publish(version, PACKING, weights, base=store.newest)
        except NoRoomForVersion as error:
            if not store.make_room(error.objects, renew=error.renew):
                raise
        else:
            return


@settings(max_examples=40)
@given(
    limit=st.floats(3.0, 5.0),
    shares=st.lists(st.sampled_from([0.001, 0.05, 0.2, 0.3, 0.45, 0.6, 1.0]), min_size=1, max_size=24),
    keep=st.sampled_from([1, 3, 100]),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_changes_no_version_is_refused(limit: float, shares: list[float], keep: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), compress=True, bytes_max=int(limit * MODEL_BYTES))
        history = {1: first_weights(seed)}
        publish(store, 1, history[1])
        for version, share in enumerate(shares, 2):
            history[version] = changed(history[version - 1], share, rng)
            publish(store, version, history[version])
            store.collect(keep)
            assert store.objects.used_bytes <= limit * MODEL_BYTES
            assert store.newest == version
        assert all(same(list(store.read(version)), history[version]) for version in store.versions())
        assert verify(store) == ()
        store.close()


@pytest.mark.parametrize("share", [0.2, 0.3, 0.45, 0.6, 1.0])
def test_a_publisher_goes_on_for_ever_in_room_for_three_models(memory_path: Path, share: float) -> None:
    elements = 100_000
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(elements, generator=generator).bfloat16()

    async def check() -> None:
        waits = WaitBoard()
        async with WeightPublisher(memory_path / "store", waits=waits, bytes_max=6 * elements) as publisher:
            for version in range(1, 25):
                await publisher.publish(version, {"w": weights})
                moved = torch.rand(elements, generator=generator) < share
                weights[moved] = torch.randn(int(moved.sum()), generator=generator).bfloat16()
            assert len(publisher.store.versions()) > 1, "no more go than need be"
            assert verify(publisher.store) == ()

    asyncio.run(check())


def test_the_way_is_renewed_before_a_step_that_would_close_it(tmp_path: Path) -> None:
    """Who follows goes on in steps then."""
    rng = np.random.default_rng(1)
    store = Store(tmp_path, compress=True, bytes_max=int(3.3 * MODEL_BYTES))
    weights = first_weights(1)
    publish(store, 1, weights)
    renewed = []
    for version in range(2, 12):
        weights = changed(weights, 0.2, rng)
        try:
            store.publish(version, PACKING, weights, base=store.newest)
        except NoRoomForVersion as error:
            if error.renew:
                renewed.append(version)
            publish(store, version, weights)
        assert (version, version - 1) in {(link.version, link.base) for link in store.links()}
    assert renewed
    assert same(list(store.read(11)), weights)


def test_a_pin_that_takes_the_room_costs_nothing_but_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    store = Store(tmp_path, compress=True, bytes_max=3 * MODEL_BYTES)
    weights = first_weights(2)
    publish(store, 1, weights)
    store.pin(1)

    def fill() -> None:
        nonlocal weights
        for version in range(2, 12):
            weights = changed(weights, 0.6, rng)
            store.publish(version, PACKING, weights, base=store.newest)
            store.pin(version)

    with pytest.raises(NoRoomForVersion, match="unpin versions") as told:
        fill()
    kept = store.versions()
    assert not store.make_room(told.value.objects, renew=told.value.renew)
    assert store.versions() == kept
    for version in kept:
        store.unpin(version)
    publish(store, kept[-1] + 1, weights)


def test_nothing_goes_for_a_renewal_that_a_pin_makes_useless(tmp_path: Path) -> None:
    """The newest version would have room whole, the step that leads on from it would not."""
    rng = np.random.default_rng(3)
    store = Store(tmp_path, compress=True, bytes_max=int(3.4 * MODEL_BYTES))
    weights = first_weights(3)
    publish(store, 1, weights)
    store.pin(1)
    weights = changed(weights, 0.4, rng)
    publish(store, 2, weights)
    store.pin(2)
    weights = changed(weights, 0.1, rng)
    publish(store, 3, weights)
    publish(store, 4, weights)
    with pytest.raises(NoRoomForVersion) as told:
        store.publish(5, PACKING, changed(weights, 0.7, rng), base=4)
    assert told.value.renew
    assert "the version before it is to be written whole first" in str(told.value)
    before = whole_files(tmp_path)
    assert not store.make_room(told.value.objects, renew=True)
    assert whole_files(tmp_path) == before
