"""The token page: counts as a dictionary would, at every instant, whatever kills the writer."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import EngineError
from rose_executor.page_reader import PageReader
from rose_executor.page_writer import PageWriter, lacks_room
from rose_executor.token_page import HEADER_WORDS, MAGIC, SLOT_WORDS, SLOTS_MAX, RequestCount, page_bytes

INCARNATION = "f00d" * 4


def page(folder: Path, slots: int = 4, version: int = 0) -> tuple[PageWriter, PageReader]:
    path = folder / "engine-0.page"
    writer = PageWriter(path, incarnation=INCARNATION, slots=slots, version=version)
    return writer, PageReader(path)


def test_counts_a_request_and_names_its_versions(tmp_path: Path) -> None:
    writer, reader = page(tmp_path, version=7)
    writer.add("a", 3)
    writer.version = 8
    writer.add("a", 2)
    assert reader.request("a") == RequestCount(5, 7, 8, finished=False)
    writer.finish("a")
    assert reader.request("a") == RequestCount(5, 7, 8, finished=True)
    assert reader.total() == 5
    assert reader.request("b") is None
    assert (reader.incarnation, reader.pid, reader.version) == (INCARNATION, os.getpid(), 8)


def test_a_request_that_ended_without_a_token_is_known_as_such(tmp_path: Path) -> None:
    writer, reader = page(tmp_path)
    writer.finish("a")
    assert reader.request("a") == RequestCount(0, None, None, finished=True)
    assert reader.total() == 0


def test_many_requests_are_read_in_one_pass(tmp_path: Path) -> None:
    writer, reader = page(tmp_path, slots=3)
    writer.add("a", 1)
    writer.finish("a")
    writer.add("b", 2)
    writer.add("c", 3)
    assert list(reader.requests(["c", "nobody", "a"]).items()) == [
        ("c", RequestCount(3, 0, 0, finished=False)),
        ("a", RequestCount(1, 0, 0, finished=True)),
    ]
    assert reader.requests([]) == {}


def test_steps_are_a_heartbeat(tmp_path: Path) -> None:
    writer, reader = page(tmp_path)
    assert (reader.steps, reader.stepped_at_s) == (0, 0)
    writer.stepped()
    assert reader.steps == 1
    assert reader.stepped_at_s > 0


def test_finished_slots_are_reused_oldest_first_and_running_ones_never(tmp_path: Path) -> None:
    writer, reader = page(tmp_path, slots=3)
    for name in ("running", "first", "second"):
        writer.add(name, 10)
    writer.finish("first")
    writer.finish("second")
    writer.add("third", 1)
    assert reader.request("first") is None
    assert reader.request("second") == RequestCount(10, 0, 0, finished=True)
    writer.add("fourth", 1)
    assert reader.request("second") is None
    assert reader.total() == 32
    with pytest.raises(EngineError, match="all 3 slots"):
        writer.add("fifth", 1)
    assert reader.request("running") == RequestCount(10, 0, 0, finished=False)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5), st.booleans(), st.integers(0, 3)), max_size=60)
)
def test_agrees_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool, int]]
) -> None:
    writer, reader = page(tmp_path_factory.mktemp("page"), slots=8)
    total, running = 0, {}
    for name, tokens, finish, version in steps:
        writer.version = version
        writer.add(name, tokens)
        first, _, before = running.get(name, (version, version, 0))
        running[name] = (first if before else version, version, before + tokens)
        total += tokens
        if finish:
            writer.finish(name)
            del running[name]
        for held, (first, last, count) in running.items():
            assert reader.request(held) == RequestCount(
                count, first if count else None, last if count else None, finished=False
            )
        assert reader.total() == total
    writer.close()
    reader.close()


def test_a_half_written_state_is_never_read(tmp_path: Path) -> None:
    """The writer dies after any number of words of a bank, before the commit."""
    path = tmp_path / "engine-0.page"
    writer = PageWriter(path, incarnation=INCARNATION, slots=2)
    writer.add("a", 5)
    before = path.read_bytes()
    writer.add("a", 1)
    after = path.read_bytes()
    differing = [at for at in range(0, len(before), 8) if before[at : at + 8] != after[at : at + 8]]
    commit = differing[0]
    torn = bytearray(before)
    for at in differing[1:]:
        torn[at : at + 8] = after[at : at + 8]
        path.write_bytes(torn)
        reader = PageReader(path)
        assert reader.request("a") == RequestCount(5, 0, 0, finished=False)
        assert reader.total() == 5
    torn[commit : commit + 8] = after[commit : commit + 8]
    path.write_bytes(torn)
    assert PageReader(path).total() == 6


def test_readers_see_whole_states_beside_a_writer_and_after_its_kill(tmp_path: Path) -> None:
    """Each add makes tokens and last version equal; a reader that mixed two states would see them differ."""
    path = tmp_path / "engine-0.page"
    pid = os.fork()
    if pid == 0:
        try:
            _write_forever(path)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
    seen = 0
    try:
        reader = PageReader(path)
        for _ in range(3_000):
            count = reader.request("a")
            if count is not None and count.tokens:
                assert count.tokens == count.last_version
                seen = max(seen, count.tokens)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    last = reader.request("a")
    assert last is not None
    assert last.tokens == last.last_version >= seen > 0
    assert reader.total() == last.tokens
    assert reader.pid == pid


def _write_forever(path: Path) -> None:
    writer = PageWriter(path, incarnation=INCARNATION, slots=1)
    version = 0
    while True:
        version += 1
        writer.version = version
        writer.add("a", 1)
        sum(range(1000))  # an engine takes a hundred times as long for a step, at the least


def test_stays_readable_after_the_file_is_gone(tmp_path: Path) -> None:
    writer, reader = page(tmp_path)
    writer.add("a", 2)
    other = PageReader(reader.path)
    reader.discard()
    assert not other.path.exists()
    assert other.total() == 2


def test_a_slot_that_is_written_to_as_it_is_read_is_read_again_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the first reads the writer goes on by two states, so that it has written to either bank."""
    writer, reader = page(tmp_path)
    writer.add("steady", 1)
    writer.add("busy", 1)
    read, reads = reader._read, 0

    def read_beside_a_writer(*args: object) -> bytes:
        nonlocal reads
        reads += 1
        if reads < 9:
            for _ in range(2):
                writer.version = reads
                writer.add("busy", 1)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "_read", read_beside_a_writer)
    counts = reader.requests(["steady", "busy"])
    assert counts["busy"] == RequestCount(17, 0, 8, finished=False)
    assert counts["steady"] == RequestCount(1, 0, 0, finished=False)
    assert reads == 10  # the page three times and its header, then that slot three times, twice over


def test_a_slot_that_never_stands_still_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = page(tmp_path)
    writer.add("a", 1)
    read = reader._read
    monkeypatch.setattr(reader, "_read", lambda *args: writer.add("a", 1) or read(*args))
    with pytest.raises(EngineError, match="slot 0 changes as fast as it is read"):
        reader.total()


ASKED: list[Callable[[PageReader], object]] = [
    lambda reader: reader.total(),
    lambda reader: reader.request("a"),
    lambda reader: reader.version,
    lambda reader: reader.steps,
    lambda reader: reader.stepped_at_s,
]


@pytest.mark.parametrize("asked", ASKED)
def test_a_page_cut_short_is_an_error_and_no_signal(tmp_path: Path, asked: Callable[[PageReader], object]) -> None:
    path = tmp_path / "engine-0.page"
    dead = PageWriter(path, incarnation=INCARNATION, slots=64)
    dead.add("a", 3)
    dead.close()
    reader = PageReader(path)
    asked(reader)
    os.truncate(path, 0)
    with pytest.raises(EngineError, match=r"engine-0\.page is not a readable token page: it was cut short"):
        asked(reader)
    os.truncate(path, 8 * (HEADER_WORDS + 64 * SLOT_WORDS))
    with pytest.raises(EngineError, match="another file's content by now"):
        asked(reader)
    assert (reader.incarnation, reader.pid) == (INCARNATION, os.getpid())


def test_a_page_cut_short_behind_its_header_counts_nothing(tmp_path: Path) -> None:
    writer, reader = page(tmp_path)
    writer.add("a", 3)
    os.truncate(reader.path, 8 * HEADER_WORDS + 8)
    with pytest.raises(EngineError, match="it was cut short"):
        reader.total()
    assert reader.version == 0


def test_a_reader_that_is_closed_or_forgotten_keeps_no_file_open(tmp_path: Path) -> None:
    writer, reader = page(tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    reader.close()
    reader.close()
    with pytest.raises(EngineError, match="Bad file descriptor"):
        reader.total()
    forgotten = PageReader(reader.path)
    assert len(os.listdir("/proc/self/fd")) == before
    del forgotten
    gc.collect()
    reader.path.write_bytes(b"no page at all")
    with pytest.raises(EngineError, match="has 14 bytes"):
        PageReader(reader.path)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    writer.close()


@pytest.mark.timeout(30)
def test_a_pipe_is_no_page_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "engine-0.page")
    with pytest.raises(EngineError, match="is no regular file"):
        PageReader(tmp_path / "engine-0.page")


def test_a_page_of_more_slots_than_an_engine_has_is_refused_without_room_for_them(tmp_path: Path) -> None:
    path, slots = tmp_path / "engine-0.page", SLOTS_MAX + 1
    path.write_bytes(b"".join(word.to_bytes(8, "little") for word in (MAGIC, 1, slots)))
    os.truncate(path, 8 * (HEADER_WORDS + slots * SLOT_WORDS))
    with pytest.raises(EngineError, match=f"for {slots} slots"):
        PageReader(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 bytes"),
        (b"ROSEPAGE", "has 8 bytes"),
        (b"x" * 4096, "magic"),
        (b"x" * 4097, "has 4097 bytes"),
        (b"ROSEPAGE" + (99).to_bytes(8, "little") + bytes(4096), "layout 99"),
        (b"ROSEPAGE" + (1).to_bytes(8, "little") + (40).to_bytes(8, "little") + bytes(1024), "40 slots"),
        (b"ROSEPAGE" + (1).to_bytes(8, "little") + bytes(112), "0 slots"),
    ],
)
def test_refuses_what_is_not_a_page(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "engine-0.page"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=why):
        PageReader(path)


def test_a_missing_page_and_an_unwritable_place_say_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a readable token page"):
        PageReader(tmp_path / "none.page")
    with pytest.raises(EngineError, match="cannot create the token page"):
        PageWriter(tmp_path / "no" / "engine-0.page", incarnation=INCARNATION, slots=1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, None])
def test_room_for_a_page_is_what_the_disk_gives_now(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def given(fd: int, offset: int, size: int) -> None:
        asked.append(size)
        if number is not None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", given)
    why = lacks_room(tmp_path / "e.room.page", 8)
    assert asked == [page_bytes(8)]
    assert list(tmp_path.iterdir()) == []
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert why.startswith(f"{tmp_path} has no room for a token page of {page_bytes(8)} bytes: ")
    else:
        assert why == ""  # who writes it says what else is wrong
    assert lacks_room(tmp_path / "nowhere" / "e.room.page", 8) == ""


def test_room_is_asked_for_as_much_as_a_page_takes(tmp_path: Path) -> None:
    writer, reader = page(tmp_path, slots=8)
    assert reader.path.stat().st_size == page_bytes(8)
    writer.close()
    reader.close()
