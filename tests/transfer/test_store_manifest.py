"""A manifest has one text; whatever else comes from the network is refused, and never anything but that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose_transfer.store import BucketEntry, BucketId, Manifest, manifest, object_key
from rose_transfer.store.canonical import MalformedRecord

PACKING_KEY = object_key(b"packing")


def an_entry(index: int, *, before: int = 5, after: int = 2**64 - 1) -> BucketEntry:
    return BucketEntry(BucketId("tp 1", index), object_key(b"%d" % index), 1, 100 + index, 4096, before, after)


def a_manifest() -> Manifest:
    return Manifest(7, 6, "steps", PACKING_KEY, (an_entry(0), an_entry(1)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    hashes = st.integers(0, 2**64 - 1)
    shard_class = draw(st.text(max_size=5))
    entries = tuple(
        BucketEntry(
            BucketId(shard_class, index),
            object_key(draw(st.binary(max_size=3))),
            draw(st.integers(0, 1)),
            draw(st.integers(0, 2**26)),
            draw(st.integers(0, 2**26)),
            draw(hashes),
            draw(hashes),
        )
        for index in range(draw(st.integers(0, 3)))
    )
    base = draw(st.none() | st.integers(0, 9))
    mode = "overwrite" if base is None else draw(st.sampled_from(["steps", "overwrite"]))
    return Manifest(draw(st.integers(10, 2**63 - 1)), base, mode, PACKING_KEY, entries)


@settings(max_examples=60, deadline=None)
@given(manifests())
@example(a_manifest())
def test_a_manifest_is_read_as_it_was_written(made: Manifest) -> None:
    text = made.to_bytes()
    read = manifest.from_bytes(text)
    assert read == made
    assert read.to_bytes() == text
    assert read.link.encoded_bytes == sum(entry.encoded_bytes for entry in made.buckets)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused_or_another_manifest(data: st.DataObject) -> None:
    """Cut, doubled, changed anywhere: never another error, and never a text that is not the one of its value."""
    text = a_manifest().to_bytes()
    at = data.draw(st.integers(0, len(text)))
    put = data.draw(st.binary(max_size=4))
    end = data.draw(st.integers(at, min(len(text), at + 5)))
    spoiled = text[:at] + put + text[end:]
    try:
        read = manifest.from_bytes(spoiled)
    except MalformedRecord:
        return
    assert read.to_bytes() == spoiled


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(["base", "buckets", "fingerprint", "layout", "mode", "packing", "version", "more"]),
)
def test_any_value_for_any_key(value: Any, key: str) -> None:
    text = json.dumps({**json.loads(a_manifest().to_bytes()), key: value}, sort_keys=True, separators=(",", ":"))
    try:
        assert manifest.from_bytes(text.encode()).to_bytes() == text.encode()
    except MalformedRecord:
        return


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.update(fingerprint="0" * 64),
        lambda value: value.update(layout=2),
        lambda value: value.update(mode="dense"),
        lambda value: value.update(version=7.0),
        lambda value: value.update(version=True),
        lambda value: value.update(version=-1),
        lambda value: value.update(version=6),
        lambda value: value.update(base=None),
        lambda value: value.update(packing="../" + "a" * 61),
        lambda value: value.update(more=1),
        lambda value: value.pop("packing"),
        lambda value: value["buckets"].pop(),
        lambda value: value["buckets"].reverse(),
        lambda value: value["buckets"].append(value["buckets"][0]),
        lambda value: value["buckets"][0].update(object="x"),
        lambda value: value["buckets"][0].update(level=2),
        lambda value: value["buckets"][0].update(dense_bytes=2**26 + 1),
        lambda value: value["buckets"][0].update(after="-000000000000001"),
        lambda value: value["buckets"][0].update(after="0x00000000000001"),
        lambda value: value["buckets"][0].update(after="f" * 17),
        lambda value: value["buckets"][0].update(bucket=["all"]),
        lambda value: value["buckets"][0].update(bucket=[1, 1]),
    ],
)
def test_what_is_refused(spoil: Any) -> None:
    value = json.loads(a_manifest().to_bytes())
    spoil(value)
    with pytest.raises(MalformedRecord):
        manifest.from_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"layout":' + b"9" * 5000 + b"}",
        a_manifest().to_bytes() + b" ",
        a_manifest().to_bytes().replace(b'"version":7', b'"version":7,"version":7'),
        a_manifest().to_bytes().replace(b'"version":7', b'"version": 7'),
        a_manifest().to_bytes().replace(b'"version":7', b'"version":07'),
    ],
)
def test_what_is_no_canonical_text(text: bytes) -> None:
    with pytest.raises(MalformedRecord):
        manifest.from_bytes(text)


def test_a_fingerprint_is_that_of_packing_and_hashes() -> None:
    made = a_manifest()
    others = (
        Manifest(7, 6, "steps", object_key(b"other"), made.buckets),
        Manifest(7, 6, "steps", PACKING_KEY, (made.buckets[0], an_entry(1, after=8))),
        Manifest(7, 6, "steps", PACKING_KEY, made.buckets[:1]),
    )
    assert len({one.fingerprint for one in (made, *others)}) == 4
    again = Manifest(8, None, "overwrite", PACKING_KEY, tuple(an_entry(index, before=0) for index in range(2)))
    assert again.fingerprint == made.fingerprint
    assert again.base_fingerprint is None
    assert made.base_fingerprint == manifest.fingerprint(PACKING_KEY, [5, 5])


def test_the_mark_of_a_version() -> None:
    text = manifest.mark_bytes(7, "ab")
    assert manifest.mark_from_bytes(text) == (7, "ab")
    for spoiled in (b"{}", text + b"\n", text.replace(b"7", b"-7"), text.replace(b'"ab"', b"3")):
        with pytest.raises(MalformedRecord):
            manifest.mark_from_bytes(spoiled)
