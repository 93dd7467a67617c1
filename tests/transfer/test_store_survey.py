"""What is said of a store while its writer goes on: what it retires meanwhile is no damage, and damage is found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_tools import PACKING, Bits, moved, publish_line

from rose.errors import TransferError
from rose_transfer.store import Store, StoreReader, reader
from rose_transfer.store.roles import Role, hold_alone
from rose_transfer.store.survey import diff, listing, verify

VERSIONS = 7


@pytest.fixture
def store(memory_path: Path) -> Iterator[Store]:
    made = Store(memory_path / "store")
    publish_line(made, VERSIONS, share=0.001)
    yield made
    made.close()


@pytest.fixture
def overtake(store: Store) -> Callable[[], None]:
    """The writer retires one more version, until the last two and the first are left: the way to those is replaced."""
    leaving = list(range(2, VERSIONS - 1))

    def overtake() -> None:
        if leaving:
            store.retire(leaving.pop(0))

    return overtake


def each_look_is_overtaken(monkeypatch: pytest.MonkeyPatch, overtake: Callable[[], None]) -> None:
    """The names of links are listed; before the first is read, the writer has gone on."""
    listed = reader.files_in

    def files_in(folder: Path) -> Iterator[tuple[str, int]]:
        found = list(listed(folder))
        if folder.name == "links":
            overtake()
        return iter(found)

    monkeypatch.setattr(reader, "files_in", files_in)


def each_reading_is_overtaken(monkeypatch: pytest.MonkeyPatch, overtake: Callable[[], None]) -> None:
    """Between the look at the folder and the reading of the last version, the writer has gone on."""
    read = StoreReader.read

    def overtaken(self: StoreReader, version: int) -> Iterator[Bits]:
        if version == VERSIONS:
            overtake()
        return read(self, version)

    monkeypatch.setattr(StoreReader, "read", overtaken)


@pytest.mark.parametrize("overtaken", [each_look_is_overtaken, each_reading_is_overtaken])
def test_a_version_whose_ways_are_replaced_again_and_again_is_no_damage(
    store: Store,
    overtake: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    overtaken: Callable[[pytest.MonkeyPatch, Callable[[], None]], None],
) -> None:
    looking = StoreReader(store.folder)
    overtaken(monkeypatch, overtake)
    if overtaken is each_look_is_overtaken:
        looking.scan()
    assert verify(looking) == ()
    assert store.versions() == (1, VERSIONS - 1, VERSIONS), "all were overtaken"


def test_no_version_is_listed_as_lost_that_a_writer_leads_to_on_another_way(
    store: Store, overtake: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    each_look_is_overtaken(monkeypatch, overtake)
    assert [row.version for row in listing(StoreReader(store.folder)) if row.joiner_bytes is None] == []


@pytest.mark.parametrize("overtaken", [each_look_is_overtaken, each_reading_is_overtaken])
def test_damage_is_found_although_each_look_is_overtaken(
    store: Store,
    overtake: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    overtaken: Callable[[pytest.MonkeyPatch, Callable[[], None]], None],
) -> None:
    (last,) = store.steps(VERSIONS - 1, VERSIONS)
    damaged = store.folder / "objects" / max(last.manifest.buckets, key=lambda entry: entry.encoded_bytes).key
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    looking = StoreReader(store.folder)
    overtaken(monkeypatch, overtake)
    found = verify(looking)
    assert any(line.startswith(f"version {VERSIONS}: ") for line in found)
    assert not any(line.startswith(f"version {VERSIONS - 1}: ") for line in found)


def test_versions_are_compared_although_the_ways_to_them_are_replaced(
    store: Store, overtake: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = diff(store, 1, VERSIONS)
    looking = StoreReader(store.folder)
    each_reading_is_overtaken(monkeypatch, overtake)
    assert diff(looking, 1, VERSIONS) == expected
    assert store.versions() == (1, VERSIONS - 1, VERSIONS)
    assert caplog.messages == []


def test_a_version_that_is_retired_while_it_is_compared_is_not_told_as_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looking = StoreReader(store.folder)
    each_reading_is_overtaken(monkeypatch, lambda: store.collect(1))
    with pytest.raises(TransferError, match="version 2 was retired meanwhile"):
        diff(looking, 2, VERSIONS)
    assert caplog.messages == []


@pytest.mark.parametrize("overtaken", [True, False])
def test_a_version_that_is_lost_is_told_as_lost_when_it_is_compared(
    store: Store, overtake: Callable[[], None], monkeypatch: pytest.MonkeyPatch, overtaken: bool
) -> None:
    (last,) = store.steps(VERSIONS - 1, VERSIONS)
    damaged = store.folder / "objects" / max(last.manifest.buckets, key=lambda entry: entry.encoded_bytes).key
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    looking = StoreReader(store.folder)
    if overtaken:
        each_reading_is_overtaken(monkeypatch, overtake)
    with pytest.raises(TransferError, match=f"no way leads to version {VERSIONS}"):
        diff(looking, 1, VERSIONS)


def test_a_store_that_never_rests_is_told_of(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    published = list(store.read(VERSIONS))

    def publish() -> None:
        nonlocal published
        assert store.newest is not None
        published = moved(published, 0.001, store.newest)
        store.publish(store.newest + 1, PACKING, published, base=store.newest)
        store.collect(2)

    each_look_is_overtaken(monkeypatch, publish)
    with pytest.raises(TransferError, match="changes faster than it can be looked at"):
        StoreReader(store.folder)


@pytest.mark.parametrize("relay", [False, True], ids=["a publisher", "a relay"])
def test_what_helps_is_said_to_whom_it_can_help(tmp_path: Path, relay: bool) -> None:
    """A relay cannot publish."""
    if relay:
        os.close(hold_alone(tmp_path, Role.RELAY))
    store = Store(tmp_path / "store")
    publish_line(store, 1)
    store.close()
    for found in (tmp_path / "store" / "objects").iterdir():
        if found.stat().st_size > 2000:
            found.write_bytes(bytes(found.stat().st_size))
    told = "\n".join(verify(StoreReader(tmp_path / "store")))
    assert "no way leads to version 1" in told
    assert ("publish it again" in told) == (not relay)
    assert ("remove its folder and start it again" in told) == relay
