"""What arrives is resumed after a kill, kept only with the hash of its key, and tidied away only when unused."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_tools import STRANGERS

from rose.errors import TransferError
from rose_transfer.distribution.arrival import Arrival
from rose_transfer.distribution.shelf import Shelf
from rose_transfer.store import LostObject, NoRoom, Objects, Store, object_key

CONTENT = bytes(range(256)) * 40
KEY = object_key(CONTENT)


def land(shelf: Shelf, key: str, content: bytes) -> None:
    arrival = shelf.arrival(key, len(content))
    arrival.room(len(content))[:] = content
    arrival.complete_bytes = len(content)
    arrival.finish()


def keep(shelf: Shelf, content: bytes) -> None:
    land(shelf, object_key(content), content)
    shelf.take(object_key(content))


def test_an_arrival_knows_how_far_it_came(memory_path: Path) -> None:
    path = memory_path / "object"
    first = Arrival(path, 10_000)
    assert first.complete_bytes == 0
    first.room(9_000)[:4_096] = b"x" * 4_096
    first.complete_bytes = 4_096
    again = Arrival(path, 10_000)
    assert again.complete_bytes == 4_096
    room = again.room(9_000)
    assert bytes(room[:4_096]) == b"x" * 4_096
    room[4_096:] = b"y" * (9_000 - 4_096)
    again.complete_bytes = 9_000
    again.finish()
    assert path.read_bytes() == b"x" * 4_096 + b"y" * (9_000 - 4_096)


@given(st.binary(max_size=80))
def test_a_file_that_is_no_arrival_begins_anew(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        arrival = Arrival(Path(file.name), 100)
        assert arrival.complete_bytes <= max(0, len(content) - 16)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_arrival_says_how_much_room_it_lacks(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match="no room for 8192 bytes") as told:
        Arrival(memory_path / "object", 10_000).room(8_000)
    assert told.value.needed_bytes == 8192
    assert told.value.by_quota == (number == errno.EDQUOT)


def test_an_arrival_whose_folder_is_gone_says_so_and_not_that_there_is_no_room(memory_path: Path) -> None:
    with pytest.raises(TransferError, match="look whether its folder was removed") as told:
        Arrival(memory_path / "gone" / "object", 10).room(5)
    assert not isinstance(told.value, NoRoom)
    assert "no room" not in str(told.value)


def test_what_is_missing_takes_whole_blocks_and_what_is_reserved_is_not_missing(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    keep(shelf, b"here")
    arriving = object_key(b"arriving")
    shelf.arrival(arriving, 10_000).room(5_000)
    wanted = {object_key(b"here"): 4, arriving: 5_000, object_key(b"one"): 1, object_key(b"two"): 4_090}
    assert shelf.missing_bytes(wanted) == 4096 + 8192
    assert shelf.missing_bytes({object_key(b"unknown"): None}) == 4096


def test_an_object_larger_than_it_may_be_has_no_room(memory_path: Path) -> None:
    with pytest.raises(TransferError, match="at most 10"):
        Arrival(memory_path / "object", 10).room(11)


def test_an_empty_object_arrives(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    land(shelf, object_key(b""), b"")
    shelf.take(object_key(b""))
    assert shelf.objects.read(object_key(b"")) == b""


def test_only_what_has_the_hash_of_its_key_is_kept(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    land(shelf, KEY, CONTENT[:-1] + b"?")
    with pytest.raises(LostObject):
        shelf.take(KEY)
    assert not shelf.has(KEY)
    assert shelf.arrival(KEY, len(CONTENT)).complete_bytes == 0
    land(shelf, KEY, CONTENT)
    shelf.take(KEY)
    assert shelf.has(KEY)
    assert shelf.objects.read(KEY) == CONTENT


@pytest.mark.parametrize("before", [None, b"damaged"])
def test_what_had_all_arrived_when_its_process_died_is_here(memory_path: Path, before: bytes | None) -> None:
    with closing(Shelf(memory_path, None)) as shelf:
        land(shelf, KEY, CONTENT)
    if before is not None:
        (memory_path / "objects" / KEY).write_bytes(before)
    with closing(Shelf(memory_path, None)) as shelf:
        assert shelf.has(KEY)
        assert shelf.objects.read(KEY) == CONTENT
        assert list((memory_path / "arriving").iterdir()) == []
        spoiled = object_key(b"spoiled")
        land(shelf, spoiled, b"other bytes")
        assert not shelf.has(spoiled)
        assert shelf.arrival(spoiled, 100).complete_bytes == 0


def test_what_a_loss_of_power_spoiled_is_not_here(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    keep(shelf, CONTENT)
    shelf.close()
    path = memory_path / "objects" / KEY
    path.write_bytes(CONTENT[:-1] + b"?")
    assert not Shelf(memory_path, None).has(KEY)


def test_what_a_disk_spoiled_since_it_was_compared_is_not_here(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    keep(shelf, CONTENT)
    assert shelf.has(KEY)
    (memory_path / "objects" / KEY).write_bytes(CONTENT[:-1] + b"?")
    assert not shelf.has(KEY)
    keep(shelf, CONTENT)
    assert shelf.has(KEY)
    assert shelf.objects.read(KEY) == CONTENT


def test_what_lies_beside_is_linked_unless_it_is_damaged(memory_path: Path) -> None:
    (memory_path / "store").mkdir()
    beside = Objects(memory_path / "store")
    beside.put(CONTENT)
    shelf = Shelf(memory_path / "shelf", memory_path / "store")
    assert shelf.has(KEY)
    assert (memory_path / "shelf" / "objects" / KEY).samefile(memory_path / "store" / KEY)
    shelf.keep_only(())
    assert beside.read(KEY) == CONTENT
    (memory_path / "store" / KEY).write_bytes(b"damaged")
    assert not shelf.has(KEY)
    assert not shelf.has(object_key(b"nowhere"))


def test_what_is_in_use_is_not_tidied_away(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    for content in (b"used", b"kept", b"neither"):
        keep(shelf, content)
    for key in (KEY, object_key(b"half")):
        shelf.arrival(key, 100).room(100)
    shelf.use(object_key(b"used"))
    shelf.use(KEY)
    shelf.keep_only({object_key(b"kept")})
    assert set(shelf.objects.known()) == {object_key(b"used"), object_key(b"kept")}
    assert [path.name for path in (memory_path / "arriving").iterdir()] == [KEY]
    shelf.release()
    shelf.keep_only(())
    assert shelf.objects.known() == ()
    assert list((memory_path / "arriving").iterdir()) == []


def test_a_shelf_is_free_once_what_is_being_done_has_ended(memory_path: Path) -> None:
    shelf, go_on = Shelf(memory_path, None), threading.Event()
    doing = shelf.disk(KEY).submit(go_on.wait, 30.0)
    closing = threading.Thread(target=shelf.close)
    closing.start()
    with pytest.raises(TransferError, match="this process fetches into"):
        Shelf(memory_path, None)
    go_on.set()
    closing.join(30.0)
    assert doing.result(0) is True
    Shelf(memory_path, None).close()


def test_files_of_others_are_left_where_they_are(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    keep(shelf, CONTENT)
    stray = memory_path / "arriving" / "notes.txt"
    stray.write_text("not of a shelf")
    shelf.keep_only(())
    assert shelf.objects.known() == ()
    assert stray.exists()


def test_a_shelf_whose_folder_is_gone_says_so(memory_path: Path) -> None:
    shelf = Shelf(memory_path, None)
    (memory_path / "arriving").rmdir()
    with pytest.raises(TransferError, match="cannot be tidied"):
        shelf.keep_only(())


def test_an_adopted_object_replaces_a_damaged_one_and_counts(memory_path: Path) -> None:
    (memory_path / "store").mkdir()
    objects = Objects(memory_path / "store", bytes_max=len(CONTENT) + 10)
    arrived = memory_path / KEY
    arrived.write_bytes(CONTENT)
    objects.adopt(arrived)
    (memory_path / "store" / KEY).unlink()
    (memory_path / "store" / KEY).write_bytes(b"damaged")
    objects.adopt(arrived)
    objects.adopt(arrived)
    assert objects.read(KEY) == CONTENT
    assert objects.used_bytes == len(CONTENT)
    assert arrived.read_bytes() == CONTENT
    other = memory_path / object_key(bytes(50))
    other.write_bytes(bytes(50))
    with pytest.raises(TransferError, match="no room"):
        objects.adopt(other)
    assert objects.used_bytes == len(CONTENT)


def test_a_folder_that_is_a_store_is_refused(memory_path: Path) -> None:
    Store(memory_path).close()
    with pytest.raises(TransferError, match="is a weight store"):
        Shelf(memory_path, None)
    Store(memory_path).close()


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_no_file_is_passed_over_and_named_where_it_is_in_the_way(memory_path: Path, kind: str) -> None:
    other = object_key(b"another object")
    Shelf(memory_path / "shelf", None).close()
    for name in (".draft-x", "old", KEY):
        STRANGERS[kind](memory_path / "shelf" / "objects" / name)
    for name in ("old", other):
        STRANGERS[kind](memory_path / "shelf" / "arriving" / name)
    with closing(Shelf(memory_path / "shelf", memory_path / "shelf" / "arriving")) as shelf:
        assert not shelf.has(KEY)
        assert not shelf.has(other), "nor linked from beside"
        with pytest.raises(TransferError, match=f"{other} is a .*, not a file"):
            shelf.arrival(other, 100)
        keep(shelf, CONTENT[:100])
        shelf.keep_only(())
        assert shelf.objects.known() == ()
        if kind == "a folder":
            with pytest.raises(TransferError, match="cannot be taken into"):
                keep(shelf, CONTENT)
        else:
            keep(shelf, CONTENT)
            assert shelf.objects.read(KEY) == CONTENT
