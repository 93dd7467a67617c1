"""Whatever dies, fills up, is damaged or comes twice: what is there is whole, and the store goes on."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_tools import PACKING, STRANGERS, Bits, first_weights, follow, moved, publish_line, same, whole_files

from rose.errors import TransferError
from rose_transfer.codec import MalformedDelta, WrongBase
from rose_transfer.store import Store, StoreReader, chain
from rose_transfer.store.survey import verify
from rose_transfer.store.writer import Recovered

CALLS = ("open", "write", "fsync", "close", "rename", "unlink")
"""What a store does to a disk."""


@contextmanager
def before_call(number: int, act: Callable[[str, tuple[object, ...]], None]) -> Iterator[list[int]]:
    """Have `act` called before call `number` of CALLS; yields the count so far."""
    count = [0]
    counting = threading.Lock()
    real = {name: getattr(os, name) for name in CALLS}

    def watched(name: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            with counting:
                count[0] += 1
                mine = count[0]
            if mine == number:
                act(name, arguments)
            return real[name](*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))
    try:
        yield count
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def die(name: str, arguments: tuple[object, ...]) -> None:
    """Before the call; of a write, half is still done."""
    if name == "write":
        descriptor, data = arguments
        assert isinstance(descriptor, int)
        assert isinstance(data, memoryview)
        os.pwrite(descriptor, data[: len(data) // 2], 0)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before_call(number: int, work: Callable[[], None]) -> bool:
    """Do `work` in a child that dies before its call `number`; False if it came to its end before."""
    child = os.fork()
    if child == 0:
        try:
            with before_call(number, die):
                work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a folder: these tests flush to disk some thousand times."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="rose-store-") as folder:
        yield Path(folder)


@pytest.fixture
def template(tmp_path: Path) -> tuple[Path, dict[int, list[Bits]]]:
    """A closed store with versions 1 to 4, to be copied."""
    store = Store(tmp_path / "template")
    history = publish_line(store, 4, share=0.02)
    store.close()
    return tmp_path / "template", history


def check(store: StoreReader, history: dict[int, list[Bits]]) -> None:
    """Everything that the store has is right, and it has nothing else on disk."""
    for goal in store.versions():
        for start in (None, *store.versions()):
            held = None if start is None else history[start]
            whole = None if start is None else store.fingerprint(start)
            assert same(follow(store, store.steps(start, goal), held, whole), history[goal])
    used = {f"objects/{key}" for one in store.manifests() for key in (one.key, *one.object_keys())}
    files = whole_files(store.folder)
    assert {name for name in files if name.startswith("objects/")} == used
    assert len(files) == len(used) + len(store.versions()) + len(store.manifests())


@pytest.mark.parametrize("what", ["steps", "whole"])
def test_a_publisher_killed_before_any_call_leaves_no_lie(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], what: str
) -> None:
    original, history = template
    history[5] = moved(history[4], 0.02, 5)
    folder = tmp_path / "store"

    def work() -> None:
        Store(folder).publish(5, PACKING, history[5], 4 if what == "steps" else None)

    number, seen, drafts, objects = 0, [False], 0, 0
    killed = True
    while killed:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        killed = killed_before_call(number, work)
        reader = StoreReader(folder)
        assert reader.versions() in ((1, 2, 3, 4), (1, 2, 3, 4, 5))
        assert all(same(list(reader.read(version)), history[version]) for version in reader.versions())
        seen.append(reader.newest == 5)
        store = Store(folder)
        check(store, history)
        assert store.recovered.versions == 0
        drafts += store.recovered.drafts
        objects += store.recovered.objects
        if not seen[-1]:
            assert store.publish(5, PACKING, history[5], base=4).base == 4
        assert same(list(store.read(5)), history[5])
        store.close()
    assert seen == sorted(seen), "once it is there, it is there"
    assert seen[-1]
    assert number > 25
    assert drafts >= 10
    assert objects >= 10


def test_a_collector_killed_before_any_call_leaves_no_lie(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    original, history = template
    folder = tmp_path / "store"

    def work() -> None:
        dying = Store(folder)
        dying.pin(2)
        dying.collect(1)

    number = 0
    killed = True
    while killed:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        killed = killed_before_call(number, work)
        store = Store(folder)
        assert {2, 4} <= set(store.versions())
        assert store.recovered.versions == 0
        check(store, history)
        store.pin(2)
        store.collect(1)
        assert store.versions() == (2, 4)
        check(store, history)
        store.close()
    assert number > 25


def test_a_disk_that_fails_at_any_call_leaves_the_store_as_it_was(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    original, history = template
    history[5] = moved(history[4], 0.02, 5)
    number, failed = 0, True
    while failed:
        number += 1
        folder = tmp_path / f"store-{number}"
        shutil.copytree(original, folder)
        store = Store(folder)
        before = whole_files(folder)

        def fail(name: str, arguments: tuple[object, ...], number: int = number) -> None:
            if name == "close":
                os.closerange(int(str(arguments[0])), int(str(arguments[0])) + 1)
            code = errno.ENOSPC if number % 2 else errno.EIO
            raise OSError(code, os.strerror(code))

        with before_call(number, fail):
            try:
                store.publish(5, PACKING, history[5], base=4)
                failed = False
            except TransferError:
                failed = True
        if failed:
            assert whole_files(folder) == before
            assert store.versions() == (1, 2, 3, 4)
            store.publish(5, PACKING, history[5], base=4)
        check(store, history)
        store.close()
        shutil.rmtree(folder)
    assert number > 25


def test_everything_is_flushed_before_what_refers_to_it(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, history = template
    store = Store(original)
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def watched_rename(source: str, target: Path) -> None:
        assert ("fsync", Path(source).name) in calls
        calls.append(("rename", target.parent.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    store.publish(5, PACKING, moved(history[4], 0.9, 5), base=4)
    assert calls[-1] == ("fsync", "versions")
    named = [call for call in calls if not call[1].startswith(".draft-")]
    objects = len(PACKING.buckets) + 1
    assert named[:objects] == [("rename", "objects")] * objects
    assert named[objects:] == [
        ("fsync", "objects"),
        ("rename", "links"),
        ("fsync", "links"),
        ("rename", "versions"),
        ("fsync", "versions"),
    ]


def test_one_of_two_publishers_wins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 2)
    with pytest.raises(TransferError, match=r"this process writes to .* already"):
        Store(tmp_path)
    assert same(list(StoreReader(tmp_path).read(2)), history[2])
    store.close()
    other = Store(tmp_path)
    assert other.recovered == Recovered()
    other.close()


def test_of_many_that_start_at_once_one_publishes(tmp_path: Path) -> None:
    """The winner keeps its lock until all others have been refused."""
    start, starting = os.pipe()
    end, ending = os.pipe()
    children: list[int] = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                os.close(starting)
                os.close(ending)
                os.read(start, 1)
                store = Store(tmp_path)
                store.publish(1, PACKING, first_weights(number))
                os.read(end, 1)
                os._exit(0)
            except TransferError as error:
                os._exit(2 if "another process writes" in str(error) else 3)
            finally:
                os._exit(4)
        children.append(child)
    os.close(starting)
    statuses: list[int] = []
    while children:
        child, status = os.waitpid(-1, 0)
        children.remove(child)
        statuses.append(os.waitstatus_to_exitcode(status))
        if len(statuses) == 3:
            os.close(ending)
    os.close(start)
    os.close(end)
    assert statuses == [2, 2, 2, 0]
    reader = StoreReader(tmp_path)
    assert any(same(list(reader.read(1)), first_weights(number)) for number in range(4))


def test_a_publisher_that_was_killed_lets_the_next_one_in(tmp_path: Path) -> None:
    def work() -> None:
        Store(tmp_path).publish(1, PACKING, first_weights(1))

    assert killed_before_call(20, work)
    store = Store(tmp_path)
    assert store.recovered.objects + store.recovered.drafts > 0
    store.publish(1, PACKING, first_weights(1))


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_damaged_object_never_makes_a_wrong_version(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], damage: str
) -> None:
    """Each object in turn: other ways are taken, over a dense version if need be; where there is none, it says so."""
    original, history = template
    store = Store(original)
    store.publish(5, PACKING, moved(history[4], 0.02, 5))
    history[5] = moved(history[4], 0.02, 5)
    history[6] = moved(history[5], 0.02, 6)
    store.publish(6, PACKING, history[6], base=5)
    others = {store.packing_key(1), *(manifest.key for manifest in store.manifests())}
    keys = [key for key in store.objects.known() if key not in others]
    store.close()
    refused = 0
    for key in keys:
        folder = tmp_path / "store"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        store = Store(folder)
        path = folder / "objects" / key
        if damage == "flip":
            path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
            assert any("object" in line for line in verify(StoreReader(folder)))
        else:
            path.unlink()
        for version in store.versions():
            try:
                assert same(list(store.read(version)), history[version])
            except TransferError:
                refused += 1
        for start, goal in ((2, 4), (4, 6), (6, 5), (1, 6)):
            try:
                assert same(
                    follow(store, store.delta(start, goal), history[start], store.fingerprint(start)), history[goal]
                )
            except TransferError:
                refused += 1
        assert store.publish(7, PACKING, moved(history[6], 0.1, 7), base=6).version == 7
        assert same(list(store.read(7)), moved(history[6], 0.1, 7))
        store.close()
        reopened = Store(folder)
        assert reopened.newest == 7
        assert verify(reopened) == () or damage == "flip"
        reopened.close()
    assert 0 < refused < 6 * len(keys)


def test_a_missing_link_leads_over_the_dense_version(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    original, _ = template
    store = Store(original)
    store.publish(5, PACKING, first_weights(5))
    store.publish(6, PACKING, first_weights(6), base=5)
    (missing,) = (manifest for manifest in store.manifests() if manifest.version == 3)
    store.close()
    (original / "objects" / missing.buckets[0].key).unlink()
    store = Store(original)
    assert store.versions() == (1, 2, 5, 6), "3 and 4 can no longer be had from nothing"
    assert store.recovered.versions == 2
    assert store.recovered.manifests == 2
    steps = store.delta(2, 6)
    assert steps[0].manifest.base is None
    assert same(follow(store, steps, None, None), first_weights(6))


def test_files_that_are_no_manifests_are_removed_and_counted(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    original, history = template
    links, versions = original / "links", original / "versions"
    (links / "v000009-whole").write_bytes(b"{")
    (links / "v000008-whole").write_bytes((links / "v000001-whole").read_bytes())
    (links / ".draft-abc").write_bytes(b"half")
    (versions / "v000007").write_bytes((versions / "v000004").read_bytes())
    (versions / "v000008").write_bytes(b"null")
    (original / "objects" / ("0" * 64)).write_bytes(b"stray")
    reader = StoreReader(original)
    assert reader.versions() == (1, 2, 3, 4)
    store = Store(original)
    assert store.recovered == Recovered(drafts=1, manifests=2, versions=2, objects=1)
    check(store, history)


def test_a_file_under_another_s_name_counts_as_not_there(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    original, history = template
    (original / "links" / "v000003-from-v000002").rename(original / "links" / "v000003-from-v000001")
    (original / "versions" / "v000002").rename(original / "versions" / "v000009")
    assert StoreReader(original).versions() == (1, 3, 4)
    store = Store(original)
    assert store.versions() == (1,), "3 and 4 can no longer be had"
    assert store.recovered.versions == 3
    check(store, history)


def test_a_damaged_way_gives_way_to_a_longer_one(tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]) -> None:
    original, history = template
    store = Store(original)
    (step,) = store.delta(1, 4)
    damaged = original / "objects" / step.manifest.buckets[1].key
    damaged.write_bytes(bytes(byte ^ 1 for byte in damaged.read_bytes()))
    assert len(store.steps(None, 4)) == 2
    assert same(list(store.read(4)), history[4])
    assert len(store.steps(None, 4)) == 4
    (again,) = store.delta(1, 4)
    assert again == step, "made anew"
    assert verify(store) == ()


def test_deltas_that_cannot_be_merged_are_given_one_by_one(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for the merged ones, or for a version written whole: nothing of them stays, and nothing else changes."""
    original, history = template
    Store(original).close()
    used = StoreReader(original).objects.used_bytes
    store = Store(original, bytes_max=used + 200)
    steps = store.delta(1, 4)
    assert [step.manifest.version for step in steps] == [2, 3, 4]
    assert same(follow(store, steps, history[1], store.fingerprint(1)), history[4])
    check(store, history)
    monkeypatch.setattr(chain, "ANCHOR_EXCESS", 0.0)
    store.collect(3)
    assert [link.version for link in store.links() if link.base is None] == [1]
    check(store, history)


def test_a_damaged_object_is_not_merged(tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]) -> None:
    original, history = template
    store = Store(original)
    (third,) = (manifest for manifest in store.manifests() if manifest.version == 3)
    (original / "objects" / third.buckets[-2].key).write_bytes(b"?")
    with pytest.raises(TransferError, match="no way leads to version 4"):
        store.delta(1, 4)
    kept = {key for one in store.manifests() for key in (one.key, *one.object_keys())}
    assert set(store.objects.known()) == kept
    assert same(list(store.read(2)), history[2])


def test_a_manifest_to_another_version_of_the_same_number_is_left_out(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    """Another run's version 3 on this run's version 2, with all its objects."""
    original, history = template
    other = Store(tmp_path / "other")
    other.publish(2, PACKING, history[2])
    other.publish(3, PACKING, first_weights(77), base=2)
    other.close()
    for folder in ("objects", "links"):
        shutil.copytree(tmp_path / "other" / folder, original / folder, dirs_exist_ok=True)
    store = Store(original)
    assert store.versions() == (1, 2)
    assert same(list(store.read(2)), history[2])
    check(store, history)


def test_many_read_while_versions_come_and_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = publish_line(store, 3, share=0.05)
    wrong: list[int] = []
    ended: list[int] = []
    done = threading.Event()

    def receive() -> None:
        held, whole, at = history[1], store.fingerprint(1), 1
        while not done.is_set():
            goal = store.versions()[-1]
            try:
                steps = store.delta(at, goal)
                held = follow(store, steps, held, whole)
            except (MalformedDelta, WrongBase):
                return
            except TransferError:
                # Retired while it was asked for, or fetched.
                continue
            at = goal
            whole = steps[-1].manifest.fingerprint if steps else whole
            if not same(held, history[goal]):
                wrong.append(goal)
                return
        ended.append(at)

    threads = [threading.Thread(target=receive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(4, 12):
        history[version] = moved(history[version - 1], 0.05, version)
        store.publish(version, PACKING, history[version], base=version - 1)
        store.collect(2)
    done.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert len(ended) == len(threads)


def test_a_closed_store_writes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    history = publish_line(store, 3, share=0.02)
    (step,) = store.steps(2, 3)
    store.close()
    before = whole_files(store.folder)
    writes: tuple[Callable[[], object], ...] = (
        lambda: store.publish(4, PACKING, history[3]),
        lambda: store.delta(None, 3),
        lambda: store.retire(1),
        lambda: store.receive(step.manifest).__enter__(),
        store.clear,
    )
    for write in writes:
        with pytest.raises(TransferError, match="was closed"):
            write()
    store.leave_out(step.manifest, "found by a reader that goes on")
    assert whole_files(store.folder) == before


def test_a_cleared_store_begins_anew_with_any_number(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    publish_line(store, 3, share=0.02)
    store.clear()
    assert whole_files(store.folder) == set()
    assert (store.versions(), store.newest, store.objects.used_bytes) == ((), None, 0)
    history = {1: first_weights(9)}
    store.publish(1, PACKING, history[1])
    check(store, history)


def test_a_store_knows_the_bits_of_versions_that_are_kept_or_passed_through(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    publish_line(store, 3, share=0.02)
    bits = {version: store.fingerprint(version) for version in store.versions()}
    store.retire(1)
    assert 1 not in store.versions()
    assert all(store.holds(version, whole) for version, whole in bits.items())
    assert not store.holds(2, bits[3])
    assert not store.holds(4, bits[3])
    store.retire(2)
    assert not store.holds(2, bits[2]), "bypassed by then"


def test_a_version_whose_base_the_disk_has_lost_is_written_whole_from_memory(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    history = publish_line(store, 2, share=0.02)
    for found in store.manifests():
        if found.base is None:
            store.leave_out(found, "its objects are damaged")
    history[3] = moved(history[2], 0.02, 3)
    assert store.publish(3, PACKING, history[3], base=2).base == 2
    with pytest.raises(TransferError, match="no way leads"):
        store.steps(None, 3)
    store.collect(1)
    assert same(list(store.read(3)), history[3])
    assert verify(store) == ()


def test_a_sound_way_in_the_place_of_a_damaged_one_stays_whoever_finds_the_damage_late(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    history = publish_line(store, 1)
    (damaged,) = store.manifests()
    store.leave_out(damaged, "found by one reader")
    assert store.manifests() == ()
    store.collect(1)
    assert store.manifests() == (damaged,), "written anew, to the byte"
    store.leave_out(damaged, "found by another one, who began before")
    check(store, history)
    store.close()
    check(StoreReader(store.folder), history)


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_no_file_and_not_needed_is_passed_over_and_named(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    original, history = template
    elsewhere = [f"objects/{'a' * 64}", "objects/.draft-x", "links/old", "links/.draft-x", "versions/\udcff"]
    in_place = ["links/v000009-whole", "versions/v000009"]
    for name in (*elsewhere, *in_place):
        STRANGERS[kind](original / name)
    reader = StoreReader(original)
    assert len(verify(reader)) == len(in_place)
    assert all(line.startswith(tuple(in_place)) and "not a file" in line for line in verify(reader))
    store = Store(original)
    assert store.recovered == Recovered()
    for name in (*elsewhere, *in_place):
        shown = str(original / name).replace("\udcff", r"\udcff")
        assert sum(f"={shown} is" in line for line in caplog.messages) == 2, "by each who looks, once"
        assert os.path.lexists(original / name)
    assert all(same(list(store.read(version)), bits) for version, bits in history.items())
    history[5] = moved(history[4], 0.02, 5)
    store.publish(5, PACKING, history[5], base=4)
    assert store.collect(1) == (1, 2, 3, 4)
    assert same(list(store.read(5)), history[5])


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_no_file_where_one_is_needed_is_damage(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], kind: str
) -> None:
    original, history = template
    reader, store = StoreReader(original), Store(original)
    (found,) = (found for found in store.manifests() if found.version == 4)
    for path in (
        original / "objects" / found.buckets[0].key,
        original / "links" / "v000003-from-v000002",
        original / "versions" / "v000002",
    ):
        path.unlink()
        STRANGERS[kind](path)
    assert not store.is_linked(next(found for found in reader.manifests() if found.version == 3))
    found_wrong = verify(StoreReader(original))
    assert any("not there whole" in line for line in found_wrong)
    assert sum("not a file" in line for line in found_wrong) == 2
    assert same(list(store.read(1)), history[1])
    with pytest.raises(TransferError, match="no way leads to version 4"):
        list(store.read(4))


def test_a_draft_that_cannot_be_removed_is_in_nobody_s_way(
    tmp_path: Path,
    template: tuple[Path, dict[int, list[Bits]]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, history = template
    draft = original / "objects" / ".draft-of-somebody"
    draft.write_bytes(b"half")
    real = os.unlink

    def unlink(path: Path) -> None:
        if path == draft:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    store = Store(original)
    assert any(str(draft) in line and "cannot be removed" in line for line in caplog.messages)
    assert store.recovered == Recovered()
    assert same(list(store.read(4)), history[4])
