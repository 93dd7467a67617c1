"""Every kept version can be had from every other one and from nothing, to the bit, whatever the history."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import PACKING, Bits, first_weights, follow, moved, publish_line, same, whole_files

from rose.errors import TransferError
from rose_transfer.codec import bucket_hash, encode
from rose_transfer.layout.layout import Parameter
from rose_transfer.store import NoRoom, Store, StoreReader
from rose_transfer.store.packing import pack_whole
from rose_transfer.store.survey import diff, listing, verify


def check_all_pairs(store: Store, history: dict[int, list[Bits]], *, merged: bool) -> None:
    for goal in store.versions():
        assert same(list(store.read(goal)), history[goal])
        for start in (None, *store.versions()):
            steps = store.delta(start, goal) if merged else store.steps(start, goal)
            held = None if start is None else history[start]
            whole = None if start is None else store.fingerprint(start)
            assert same(follow(store, steps, held, whole), history[goal])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    """Publishing on from any kept version, retiring, pinning, asking and opening again, in any order."""
    history: dict[int, list[Bits]] = {}
    compress = data.draw(st.booleans(), label="compress")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), compress=compress)
        for version in range(1, data.draw(st.integers(2, 9), label="versions") + 1):
            kept = store.versions()
            base = data.draw(st.sampled_from([*kept[-3:], *kept[-1:] * 4, None]), label="base")
            share = data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.9]), label="share")
            new = first_weights(version) if base is None else moved(history[base], share, version)
            history[version] = new
            assert store.publish(version, PACKING, new, base).base == base
            match data.draw(st.sampled_from(["", "", "collect", "reopen", "ask"]), label="then"):
                case "collect":
                    pinned = data.draw(st.sets(st.sampled_from(store.versions()), max_size=1), label="pinned")
                    for pin in pinned:
                        store.pin(pin)
                    store.collect(data.draw(st.integers(1, 4), label="keep"))
                    assert pinned <= set(store.versions())
                    for pin in pinned:
                        store.unpin(pin)
                case "reopen":
                    before = store.versions(), store.links()
                    store.close()
                    store = Store(Path(folder), compress=compress)
                    assert (store.versions(), store.links()) == before or len(store.links()) < len(before[1])
                    assert not store.recovered.versions
                case "ask":
                    store.delta(data.draw(st.sampled_from([None, *store.versions()]), label="from"), version)
        check_all_pairs(store, history, merged=False)
        check_all_pairs(store, history, merged=True)
        assert verify(store) == ()
        store.close()


def test_a_merged_delta_is_the_direct_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 6)
    for start, goal in ((2, 6), (6, 2)):
        (step,) = store.delta(start, goal)
        assert step.backwards == (start > goal)
        for entry, old, new in zip(step.manifest.buckets, history[2], history[6], strict=True):
            assert store.objects.read(entry.key) == encode(old, new, bucket_hash(old)).to_wire()
    assert store.steps(2, 6) == store.delta(2, 6), "kept for the next who asks"


def test_one_who_joins_gets_a_dense_version_and_one_delta(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 6, share=0.01)
    steps = store.delta(None, 6)
    assert [(step.manifest.base, step.manifest.version) for step in steps] == [(None, 1), (1, 6)]
    assert same(follow(store, steps, None, None), history[6])


def test_a_version_that_nobody_holds_any_more_is_fetched_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 5)
    store.collect(2)
    steps = store.delta(2, 5)
    assert steps[0].manifest.base is None
    assert same(follow(store, steps, None, None), history[5])


def test_retirement_keeps_the_last_the_pinned_and_what_they_need(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 9, share=0.01)
    store.pin(2)
    assert store.collect(3) == (1, 3, 4, 5, 6)
    assert store.retire(2) == ()
    assert store.versions() == (2, 7, 8, 9)
    ends = {(link.base, link.version) for link in store.links()}
    assert ends == {(None, 1), (1, 2), (2, 7), (7, 8), (8, 9)}, "a retired version serves as base; others are bypassed"
    check_all_pairs(store, history, merged=False)
    store.unpin(2)
    assert store.collect(3) == (2,)
    with pytest.raises(TransferError, match="version 2 is not in"):
        store.pin(2)
    assert len(store.links()) == 4
    assert {Path(name).parts[0] for name in whole_files(tmp_path)} == {"links", "objects", "versions"}
    used = {key for manifest in store.manifests() for key in (manifest.key, *manifest.object_keys())}
    assert used == set(store.objects.known()) == {file.name for file in (tmp_path / "objects").iterdir()}
    with pytest.raises(TransferError, match="version 2 is not in"):
        store.delta(9, 2)
    with pytest.raises(ValueError, match="the newest"):
        store.retire(9)


def test_deltas_that_have_grown_too_much_give_way_to_a_dense_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 9, share=0.6)
    size = sum(bits.nbytes for bits in history[1])
    store.collect(3)
    assert {link.version for link in store.links() if link.base is None} == {9}
    check_all_pairs(store, history, merged=True)
    assert store.objects.used_bytes < 3 * size


def test_deltas_of_unchanged_weights_are_stored_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights = first_weights(1)
    store.publish(1, PACKING, weights)
    store.publish(2, PACKING, weights, base=1)
    used = store.objects.used_bytes
    made = store.publish(3, PACKING, weights, base=2)
    assert store.objects.used_bytes == used + len(made.to_bytes())
    assert store.fingerprint(3) == store.fingerprint(1)


def test_numbers_rise_and_a_version_is_published_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 2)
    before = whole_files(tmp_path)
    for version in (1, 2):
        with pytest.raises(TransferError, match="numbers that rise"):
            store.publish(version, PACKING, first_weights(9))
    assert whole_files(tmp_path) == before
    check_all_pairs(store, history, merged=False)


def test_another_packing_or_an_unknown_base_is_written_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publish_line(store, 1)
    other = pack_whole({"other": Parameter((3,), "float32")})
    bits = [np.array([1.0, -0.0, np.nan], dtype=np.float32)]
    assert store.publish(2, other, bits, base=1).base is None
    assert store.publish(3, PACKING, first_weights(3), base=77).base is None
    assert [one.tobytes() for one in store.read(2)] == [bits[0].tobytes()]
    assert store.delta(2, 3)[0].manifest.base is None
    with pytest.raises(TransferError, match="packed in different ways"):
        diff(store, 2, 3)


def test_buckets_that_do_not_fit_the_packing_leave_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 2)
    before = whole_files(tmp_path)
    weights = first_weights(3)
    for wrong in (weights[:-1], [*weights, weights[0]], [weights[0][:-1], *weights[1:]], weights[::-1]):
        for base in (None, 2):
            with pytest.raises(ValueError, match=r"elements|buckets"):
                store.publish(3, PACKING, wrong, base)
            assert whole_files(tmp_path) == before
    assert store.publish(3, PACKING, moved(history[2], 0.1, 3), base=2).base == 2


def test_published_weights_do_not_follow_the_caller_s_memory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights = first_weights(1)
    kept = [bits.copy() for bits in weights]
    store.publish(1, PACKING, weights)
    for bits in weights:
        bits += 1
    store.publish(2, PACKING, weights, base=1)
    assert same(list(store.read(1)), kept)
    assert same(list(store.read(2)), weights)


def test_a_limit_is_kept_and_says_what_it_needs(tmp_path: Path) -> None:
    store = Store(tmp_path, bytes_max=60_000)
    history = publish_line(store, 3)
    refused = ""
    while (newest := store.versions()[-1]) < 30:
        before = whole_files(tmp_path), store.objects.used_bytes
        history[newest + 1] = first_weights(newest + 1)
        try:
            store.publish(newest + 1, PACKING, history[newest + 1], base=newest)
        except NoRoom as error:
            refused = str(error)
            break
    assert re.search(r"\d+ bytes needed, \d+ free", refused)
    assert 3 < newest < 30
    assert (whole_files(tmp_path), store.objects.used_bytes) == before
    assert store.objects.used_bytes <= 60_000
    check_all_pairs(store, history, merged=True)
    store.collect(1)
    assert store.publish(newest + 1, PACKING, moved(history[newest], 0.1, 7), base=newest).base == newest


def test_what_people_ask(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 3)
    store.delta(1, 3)
    reader = StoreReader(tmp_path)
    rows = listing(reader)
    assert [row.version for row in rows] == [1, 2, 3]
    assert [base for base, _ in rows[2].ways] == [1, 2]
    assert rows[0].joiner_bytes == rows[0].ways[0][1]
    assert verify(reader) == ()
    changes = {change.parameter: change for change in diff(reader, 1, 3)}
    assert {name: change.elements for name, change in changes.items()} == {"embed": 3200, "norm": 8, "proj": 2400}
    assert sum(change.changed for change in changes.values()) == sum(
        int(np.count_nonzero(old != new)) for old, new in zip(history[1], history[3], strict=True)
    )
    with pytest.raises(TransferError, match="is not a weight store"):
        StoreReader(tmp_path / "nowhere")


@pytest.mark.parametrize("number", [-1, 2**63, 1.5, "7", None, True])
def test_what_is_no_number_of_a_version_is_refused(tmp_path: Path, number: Any) -> None:
    with contextlib.closing(Store(tmp_path)) as store:
        with pytest.raises(TransferError, match="is no number of a version"):
            store.publish(number, PACKING, first_weights(1))
        assert store.versions() == ()


def test_a_trainer_may_count_in_integers_of_its_library(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path)) as store:
        assert store.publish(np.int64(5), PACKING, first_weights(1)).version == 5  # type: ignore[arg-type]
    assert StoreReader(tmp_path).versions() == (5,)
