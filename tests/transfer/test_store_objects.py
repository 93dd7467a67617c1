"""An object is what its key says, whole, once; whoever wrote it, whenever they died, however full the disk is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.errors import TransferError
from rose_transfer.store import LostObject, NoRoom, Objects, object_key
from rose_transfer.store import files as files_module

DATA = bytes(range(256)) * 5


def test_what_is_put_is_read(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    key = objects.put(DATA)
    assert (key, objects.read(key), objects.size_bytes(key)) == (object_key(DATA), DATA, len(DATA))
    empty = objects.put(b"")
    assert objects.read(empty) == b""
    assert set(Objects(tmp_path).known()) == {key, empty}
    objects.flush()


def test_the_same_bytes_are_stored_once(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    key = objects.put(DATA)
    before = (tmp_path / key).stat().st_ino
    assert objects.put(memoryview(DATA)) == objects.put(bytearray(DATA)) == key
    assert ((tmp_path / key).stat().st_ino, objects.used_bytes) == (before, len(DATA))


def test_parts_are_read_and_stay_readable_after_removal(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    key = objects.put(DATA)
    with objects.open(key) as opened:
        assert opened.path.read_bytes() == DATA
        objects.remove(key)
        assert not objects.has(key)
        assert opened.size_bytes == len(DATA)
        assert opened.read_at(250, 10) == DATA[250:260]
        assert opened.read_at(len(DATA) - 3, 3) == DATA[-3:]
        assert opened.read_at(len(DATA), 0) == b""
        with pytest.raises(TransferError, match="10 from 1275"):
            opened.read_at(len(DATA) - 5, 10)
    with pytest.raises(LostObject, match="is not there"):
        objects.open(key)
    assert objects.used_bytes == 0
    objects.remove(key)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_seen_and_mended_by_the_next_who_puts_it(tmp_path: Path, damage: str) -> None:
    objects = Objects(tmp_path)
    key = objects.put(DATA)
    path = tmp_path / key
    match damage:
        case "flip":
            path.write_bytes(b"\x01" + DATA[1:])
        case "cut":
            path.write_bytes(DATA[:-1])
        case "gone":
            path.unlink()
    with pytest.raises(LostObject):
        objects.read(key)
    objects.put(DATA)
    assert objects.read(key) == DATA
    assert objects.used_bytes == len(DATA)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "ä" * 64])
def test_a_name_from_the_network_is_never_a_path(tmp_path: Path, key: str) -> None:
    objects = Objects(tmp_path)
    assert not objects.has(key)
    for ask in (objects.open, objects.read, objects.size_bytes, objects.remove):
        with pytest.raises(LostObject, match="is no key"):
            ask(key)


def test_the_limit_counts_what_is_there_already(tmp_path: Path) -> None:
    Objects(tmp_path).put(DATA)
    objects = Objects(tmp_path, bytes_max=len(DATA) + 100)
    objects.put(b"x" * 100)
    with pytest.raises(NoRoom, match="1 bytes needed, 0 free"):
        objects.put(b"y")
    objects.put(DATA)
    objects.remove(object_key(b"x" * 100))
    objects.put(b"y" * 100)
    assert objects.used_bytes == len(DATA) + 100


def test_two_at_once_do_not_go_over_the_limit_together(tmp_path: Path) -> None:
    objects = Objects(tmp_path, bytes_max=10 * 1000)
    stored: list[str] = []

    def put(first: int) -> None:
        for number in range(first, first + 10):
            try:
                stored.append(objects.put(number.to_bytes(1000, "little")))
            except NoRoom:
                continue

    threads = [threading.Thread(target=put, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(stored) == len(list(tmp_path.iterdir())) == 10
    assert objects.used_bytes == 10 * 1000


def test_two_write_the_same_object_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have their draft whole before either gives it its name."""
    both = threading.Barrier(2, timeout=30)
    rename = os.rename

    def wait_and_rename(source: str, target: Path) -> None:
        both.wait()
        rename(source, target)

    monkeypatch.setattr(files_module.os, "rename", wait_and_rename)
    keys: list[str] = []
    one, other = Objects(tmp_path), Objects(tmp_path)
    threads = [threading.Thread(target=lambda at=at: keys.append(at.put(DATA))) for at in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert keys == [object_key(DATA)] * 2
    assert [file.name for file in tmp_path.iterdir()] == keys[:1]
    assert one.read(keys[0]) == DATA


@pytest.mark.parametrize("call", ["write", "fsync", "close", "rename"])
@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, NoRoom, "bytes needed"),
        (errno.EDQUOT, NoRoom, "bytes needed"),
        (errno.EIO, TransferError, "cannot write an object"),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[TransferError], says: str
) -> None:
    objects = Objects(tmp_path)
    real = getattr(os, call)

    def fail(*arguments: object) -> None:
        if call == "close":
            real(*arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, call, fail)
        with pytest.raises(kind, match=says):
            objects.put(DATA)
    assert list(tmp_path.iterdir()) == []
    assert objects.used_bytes == 0
    assert objects.read(objects.put(DATA)) == DATA


@pytest.mark.parametrize("taken", ["put", "adopted"])
def test_what_is_not_replaced_counts_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    objects = Objects(tmp_path)
    key = objects.put(DATA)
    (tmp_path / key).write_bytes(b"damaged")
    objects = Objects(tmp_path)
    arrived = tmp_path / "arrived" / key
    arrived.parent.mkdir()
    arrived.write_bytes(DATA)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, "rename", fail)
        with pytest.raises(TransferError):
            objects.put(DATA) if taken == "put" else objects.adopt(arrived)
    assert (objects.known(), objects.used_bytes) == ((key,), len(b"damaged"))
    objects.remove(key)
    assert (objects.known(), objects.used_bytes) == ((), 0)


def test_a_write_that_takes_less_than_it_was_given_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(files_module.os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    objects = Objects(tmp_path)
    assert objects.read(objects.put(DATA)) == DATA


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("a small file system can only be mounted as root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    objects = Objects(small_disk)
    kept = [objects.put(os.urandom(16_384)) for _ in range(3)]
    with pytest.raises(NoRoom, match="40000 bytes needed"):
        objects.put(os.urandom(40_000))
    assert sorted(file.name for file in small_disk.iterdir()) == sorted(kept)
    assert shutil.disk_usage(small_disk).free == 16_384
    assert all(len(objects.read(key)) == 16_384 for key in kept)


def test_drafts_of_the_dead_are_no_objects(tmp_path: Path) -> None:
    (tmp_path / ".draft-abc").write_bytes(b"half")
    objects = Objects(tmp_path, bytes_max=4)
    assert objects.known() == ()
    assert objects.remove_drafts() == 1
    objects.put(b"full")
