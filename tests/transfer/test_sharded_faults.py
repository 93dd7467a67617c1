"""Ranks that are wrong, out of memory, silent or dead: every rank is told, and the store has whole versions only."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import sharded_worlds as worlds
from sharded_worlds import COARSE, DIED, PACKING, in_world, weights

from rose_transfer.store import Packing, Store, StoreReader
from rose_transfer.store.buckets import pack
from rose_transfer.store.survey import verify
from rose_transfer.store.writer import Recovered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def check(folder: Path, versions: tuple[int, ...], packing: Packing = PACKING) -> None:
    store = StoreReader(folder)
    assert (store.versions(), verify(store)) == (versions, ())
    for version in versions:
        assert [bits.tobytes() for bits in store.read(version)] == [
            bits.tobytes() for bits in pack(packing, weights(version))
        ]


def test_what_one_rank_asks_for_in_vain_every_rank_is_told(folder: Path) -> None:
    first, second = in_world(2, worlds.refusals, folder)
    assert first[0] == second[0] == first[-1] == second[-1] == "published"
    assert first[1] == second[1]
    assert "rank 1 publishes version 3, rank 0 2" in first[1]
    assert "version 1 comes after 1" in first[2]
    assert second[2] == first[2], "both asked for it, so it is neither's fault"
    assert "rank 1 could not publish: transfer: rank 1: scale has shape (2, 3)" in first[3]
    assert "rank 1: scale has shape (2, 3)" in second[3]
    assert "rank 1: head, of shape (2,), is not among the tensors that are exported" in first[4]
    assert second[5] == first[5], "whichever rank owns the bucket that it belongs into"
    assert "no rank holds scale[0:1, 0:3]" in first[5]
    assert second[6] == first[6]
    assert "no rank holds norm.weight[3:6]; rank 0 holds some of it, rank 1 nothing" in first[6]
    check(folder, (1, 2))


def test_what_is_no_number_of_a_version_is_refused_on_every_rank_before_anything_is_written(folder: Path) -> None:
    """A store could not read it back, and would lose the versions that were built on it."""
    first, second = in_world(2, worlds.numbers, folder)
    assert all("is no number of a version" in words for words in first[:8] + second[:8])
    assert "rank 1 could not publish: transfer: -1 is no number" in first[7], "where only one is wrong"
    assert first[8:] == second[8:] == ["published 7", "published 8"]
    with contextlib.closing(Store(folder)) as store:
        assert (store.recovered, store.versions()) == (Recovered(), (7, 8))
    check(folder, (7, 8))


def test_a_packing_of_nothing_is_refused(folder: Path) -> None:
    first, second = in_world(2, worlds.nothing_packed, folder)
    assert first == second
    assert "version 1 would hold no weights" in first
    check(folder, ())


@pytest.mark.parametrize("step", ["take", "lay", "rooms", "empty"])
def test_a_rank_without_memory_holds_nobody_up(folder: Path, step: str) -> None:
    first, second, third = in_world(3, worlds.no_memory, folder, step)
    assert second == ["None", "no memory", "1"]
    assert first == third
    assert [first[0], first[2]] == ["None", "1"]
    assert "rank 1 could not publish: no memory" in first[1]
    check(folder, (1, 2))


def test_a_rank_without_memory_for_the_base_holds_nobody_up(folder: Path) -> None:
    first, second = in_world(2, worlds.no_memory_to_restore, folder)
    assert "rank 1 could not publish: no memory" in first[1]
    assert second[1] == "no memory"
    assert [first[0], *first[2:]] == [second[0], *second[2:]] == ["None", "None", "2"], "written whole, then in steps"
    check(folder, (1, 2, 3))


def test_a_full_disk_leaves_the_versions_before_and_the_ranks_in_step(folder: Path, tmp_path: Path) -> None:
    in_world(2, worlds.rows, tmp_path / "other", [1, 2], PACKING)
    room_bytes = sum(file.stat().st_size for file in (tmp_path / "other" / "objects").iterdir())
    first, second = in_world(2, worlds.disk_full, folder, room_bytes)
    assert first == ["NoRoomForVersion", "1"]
    assert second == ["TransferError", "1"]
    check(folder, (1, 2))


def test_where_there_is_no_room_the_oldest_versions_go_but_for_those_that_are_pinned(
    folder: Path, tmp_path: Path
) -> None:
    in_world(2, worlds.rows, tmp_path / "other", list(range(1, 8)), PACKING)
    room_bytes = sum(file.stat().st_size for file in (tmp_path / "other" / "objects").iterdir())
    first, second = in_world(2, worlds.little_room, folder, room_bytes, 12)
    assert first[0] == second[0]
    assert f"no room for {first[0]}" in first[1]
    assert f"rank 0 could not publish: {first[1]}" in second[1]
    kept = StoreReader(folder).versions()
    assert 2 in kept
    assert 12 in kept
    assert len(kept) < 12
    check(folder, kept)


def test_a_rank_that_never_comes_is_given_up_and_the_group_with_it(folder: Path) -> None:
    (once, twice), _ = in_world(2, worlds.keeps_silent, folder)
    assert "rank 0 did not get word from the others" in once
    assert "the ranks have lost each other" in twice
    assert "make a new process group" in twice
    check(folder, ())


@pytest.mark.parametrize("victim", [0, 1], ids=["the rank with the store", "another rank"])
def test_a_rank_killed_at_any_point_leaves_whole_versions(folder: Path, victim: int) -> None:
    """Each round goes on from what the round before has left, on new ranks.

    The rank with the store dies at every point; another one, whose death the same waits notice, at every second.
    """
    kept: list[int] = []
    at = 0
    while True:
        at += 1 + victim
        version = kept[-1] + 1 if kept else 1
        base = str(kept[-1]) if kept else "None"
        answers = in_world(2, worlds.dies, folder, version, victim, at)
        survivor = answers[1 - victim]
        assert survivor[0] == base
        kept.append(version)
        if answers[victim] != DIED:
            break
        written = StoreReader(folder).newest == version + 1
        assert survivor[1] in ({"LostRank", "published"} if written else {"LostRank"})
        kept += [version + 1] if written else []
        check(folder, tuple(kept), COARSE)
    assert answers[victim] == answers[1 - victim]
    assert answers[victim][:2] == [base, "published"]
    assert at - 1 - victim <= int(answers[victim][2]) < at
    assert at > 8
