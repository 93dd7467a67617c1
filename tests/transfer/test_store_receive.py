"""A second store takes versions over from a first, object by object, and believes none of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from store_tools import PACKING, Bits, first_weights, follow, moved, publish_line, same, whole_files

from rose.errors import TransferError
from rose_transfer.codec import bucket_hash, overwrite
from rose_transfer.store import LostObject, Manifest, Store
from rose_transfer.store.survey import verify


def fetch(source: Store, relay: Store, manifest: Manifest) -> int:
    """Bytes that crossed."""
    crossed = 0
    with relay.receive(manifest) as missing:
        for key in missing:
            data = source.objects.read(key)
            assert relay.objects.put(data) == key
            crossed += len(data)
    return crossed


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return Store(tmp_path / "source", compress=True)


@pytest.fixture
def relay(tmp_path: Path) -> Store:
    return Store(tmp_path / "relay")


@pytest.fixture
def history(source: Store) -> dict[int, list[Bits]]:
    return publish_line(source, 5, share=0.02)


def test_a_relay_follows_and_serves_who_joins_late(source: Store, relay: Store, history: dict[int, list[Bits]]) -> None:
    (step,) = source.delta(None, 1)
    dense = fetch(source, relay, step.manifest)
    for version in range(2, 6):
        (step,) = source.delta(version - 1, version)
        assert fetch(source, relay, step.manifest) < dense / 5
        assert relay.fingerprint(version) == source.fingerprint(version)
    relay.collect(2)
    for start in (None, 4):
        held, whole = (None, None) if start is None else (history[start], relay.fingerprint(start))
        assert same(follow(relay, relay.delta(start, 5), held, whole), history[5])
    assert verify(relay) == ()
    assert relay.publish(6, PACKING, moved(history[5], 0.1, 6), base=5).base == 5


def test_one_more_way_to_a_version_that_is_there(source: Store, relay: Store, history: dict[int, list[Bits]]) -> None:
    for version in range(1, 6):
        (step,) = source.delta(version - 1 or None, version)
        fetch(source, relay, step.manifest)
    (step,) = source.delta(1, 5)
    fetch(source, relay, step.manifest)
    assert relay.steps(1, 5) == (step,)
    assert fetch(source, relay, step.manifest) == 0, "once more changes nothing"


def test_what_is_being_received_is_not_collected(source: Store, relay: Store, history: dict[int, list[Bits]]) -> None:
    (step,) = source.delta(None, 1)
    fetch(source, relay, step.manifest)
    (step,) = source.delta(1, 2)
    with relay.receive(step.manifest) as missing:
        for key in missing:
            relay.objects.put(source.objects.read(key))
            relay.collect(1)
    assert relay.versions() == (1, 2)
    assert same(list(relay.read(2)), history[2])


def test_what_breaks_off_leaves_nothing(source: Store, relay: Store, history: dict[int, list[Bits]]) -> None:
    (step,) = source.delta(None, 1)
    with pytest.raises(LostObject), relay.receive(step.manifest) as missing:
        relay.objects.put(source.objects.read(missing[0]))
    last = step.manifest.buckets[-1].key
    (source.folder / "objects" / last).unlink()
    with pytest.raises(LostObject):
        fetch(source, relay, step.manifest)
    assert whole_files(relay.folder) == set()
    assert relay.versions() == ()
    assert relay.objects.used_bytes == 0


def test_a_version_is_there_although_what_nobody_needs_cannot_be_removed(
    source: Store, relay: Store, history: dict[int, list[Bits]]
) -> None:
    (step,) = source.delta(None, 1)
    with relay.receive(step.manifest) as missing:
        for key in missing:
            relay.objects.put(source.objects.read(key))
        stray = relay.folder / "objects" / relay.objects.put(b"of no version")
        stray.unlink()
        stray.mkdir()
    assert same(list(relay.read(1)), history[1])
    stray.rmdir()
    (step,) = source.delta(1, 2)
    fetch(source, relay, step.manifest)
    assert stray.name not in relay.objects.known(), "the next one tidies it away"


def test_a_delta_on_a_version_that_is_not_there(source: Store, relay: Store, history: dict[int, list[Bits]]) -> None:
    (step,) = source.delta(2, 3)
    with pytest.raises(TransferError, match="version 2 is not here to go on from"):
        fetch(source, relay, step.manifest)


def test_another_version_of_the_same_number(source: Store, relay: Store, history: dict[int, list[Bits]]) -> None:
    relay.publish(2, PACKING, first_weights(77))
    before = whole_files(relay.folder)
    source.collect(2)
    for manifest in source.manifests():
        if manifest.base is not None:
            with pytest.raises(TransferError, match=r"other bits|not here"):
                fetch(source, relay, manifest)
    liar = Manifest(2, None, "overwrite", source.packing_key(5), source.delta(None, 5)[0].manifest.buckets)
    with pytest.raises(TransferError, match="version 2 is here with other bits"):
        fetch(source, relay, liar)
    assert whole_files(relay.folder) == before


def test_a_manifest_that_does_not_say_what_its_objects_are(
    source: Store, relay: Store, history: dict[int, list[Bits]]
) -> None:
    (step,) = source.delta(None, 1)
    honest = step.manifest
    wrong = overwrite(history[2][0], bucket_hash(history[2][0])).to_wire()
    first = honest.buckets[0]
    liars = (
        dataclasses.replace(first, key=source.objects.put(wrong), encoded_bytes=len(wrong)),
        dataclasses.replace(first, after=first.after ^ 1),
        dataclasses.replace(first, dense_bytes=first.dense_bytes - 2),
        dataclasses.replace(first, encoded_bytes=first.encoded_bytes + 1),
        dataclasses.replace(first, key=honest.packing),
    )
    for liar in liars:
        with pytest.raises(TransferError):
            fetch(source, relay, dataclasses.replace(honest, buckets=(liar, *honest.buckets[1:])))
    for buckets in (honest.buckets[:-1], ()):
        with pytest.raises(TransferError, match="other buckets than its packing"):
            fetch(source, relay, dataclasses.replace(honest, buckets=buckets))
    assert whole_files(relay.folder) == set()
    fetch(source, relay, honest)
    assert same(list(relay.read(1)), history[1])
