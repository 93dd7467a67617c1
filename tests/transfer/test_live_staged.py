"""Once a version is staged, no object and no disk decides whether it comes, or whether the old one is there again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_tools import Line, first_state, memory_for, rank_layout, same_bits

from rose.errors import TransferError
from rose_executor.weight_worker import WeightWorker
from rose_transfer.codec import TILE_ELEMENTS, MalformedDelta, bucket_hash, overwrite
from rose_transfer.codec.streams import Streams
from rose_transfer.layout.layout import Layout
from rose_transfer.live import LiveUpdate, LiveWeights, Mixed, RolledBack, staged
from rose_transfer.live.rebased import TILES_AT_ONCE, rebased
from rose_transfer.live.staged import StagedDeltas
from rose_transfer.store import NoRoom

LONG_S = 30
BUCKET_BYTES = 2**18
WAYS = {"steps": 1, "backwards": 3, "anew": None}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def cut(path: Path) -> None:
    os.truncate(path, 50)


def spoil(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def disk_that_gives(bad: Callable[[int], bool], what: bytes | None) -> Callable[[int, list[Any], int], int]:
    """A disk of which some reads, told by their number from 0, give `what`, None to fail.

    A part of the file that was read once keeps its number.
    """
    real, seen = os.preadv, list[int]()

    def read(file: int, buffers: list[Any], offset: int) -> int:
        if offset not in seen:
            seen.append(offset)
        if not bad(seen.index(offset)):
            return real(file, buffers, offset)
        if what is None:
            raise OSError(errno.EIO, "the disk is broken")
        for buffer in buffers:
            memoryview(buffer).cast("B")[:] = what * memoryview(buffer).nbytes
        return sum(memoryview(buffer).nbytes for buffer in buffers)

    return read


class Rank:
    """A rank that runs version 1 or 3, or anything, and is brought to version 2 by a file."""

    def __init__(self, folder: Path, start: int | None, layout: Layout | None = None) -> None:
        self.layout = layout or rank_layout()
        self.line = Line(folder, [self.layout], bucket_bytes=BUCKET_BYTES)
        self.steps = self.line.store.steps(start, 2)
        old = first_state(seed=99) if start is None else self.line.states[start]
        self.memory = memory_for(self.layout, old)
        self.old = memory_for(self.layout, old)
        self.new = memory_for(self.layout, self.line.states[2])
        self.weights = LiveWeights(self.layout, self.line.packing, self.memory)

    def update(self) -> LiveUpdate:
        objects = self.line.store.folder / "objects"
        return LiveUpdate(self.weights, self.steps, self.line.store.objects.read, objects)

    def staged(self) -> LiveUpdate:
        update = self.update()
        update.stage()
        return update

    @property
    def runs_old(self) -> bool:
        return same_bits(self.memory, self.old)

    @property
    def runs_new(self) -> bool:
        return same_bits(self.memory, self.new)


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def rank(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", 0)
    return Rank(tmp_path, request.param)


@pytest.mark.parametrize("ruin", [Path.unlink, cut, spoil], ids=["deleted", "cut", "overwritten"])
def test_what_happens_to_the_objects_after_the_stage_does_not_matter(rank: Rank, ruin: Callable[[Path], None]) -> None:
    update = rank.staged()
    for path in (rank.line.store.folder / "objects").iterdir():
        ruin(path)
    update.commit()
    assert rank.runs_new
    update.roll_back()
    assert rank.runs_old


@pytest.mark.parametrize("what", [None, b"\x01"], ids=["fails", "gives other bytes"])
def test_a_read_that_fails_in_mid_commit_is_taken_back_whichever_it_is(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, what: bytes | None
) -> None:
    for bad in range(len(rank.steps) * len(rank.weights.places)):
        update = rank.staged()
        with monkeypatch.context() as patch:
            patch.setattr(staged.os, "preadv", disk_that_gives(lambda number, bad=bad: number == bad, what))
            with pytest.raises(RolledBack, match="was taken back"):
                update.commit()
        assert rank.runs_old
        update.close()
    update = rank.staged()
    update.commit()
    assert rank.runs_new


def test_a_worker_whose_disk_fails_in_mid_commit_says_so_and_goes_on(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it answers makes the engine's owner hear that the commit was undone."""
    worker = WeightWorker()
    worker.rose_model = SimpleNamespace(update=lambda *_: rank.update())  # type: ignore[assignment]
    for broken in (True, False):
        worker.rose_stage(2, "objects", [])
        assert worker.rose_stage_now is not None
        assert worker.rose_stage_now.thread is not None
        worker.rose_stage_now.thread.join(LONG_S)
        assert (worker.rose_staged() or {})["error"] == ""
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(staged.os, "preadv", disk_that_gives(lambda number: number == 3, None))
            answer = worker.rose_apply(2)
        assert ("was taken back" in answer) == broken
        assert not broken or worker.rose_undo() == ""
        assert (rank.runs_old, rank.runs_new) == (broken, not broken)
        worker.rose_settled()


def test_a_disk_that_fails_for_good_before_anything_is_written_leaves_the_old_version(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = rank.staged()
    monkeypatch.setattr(staged.os, "preadv", disk_that_gives(lambda _: True, None))
    with pytest.raises(RolledBack):
        update.commit()
    assert rank.runs_old


@pytest.mark.parametrize("form", ["published", "inexact"])
def test_a_disk_that_dies_in_mid_commit_leaves_mixed_weights_that_say_so_and_a_whole_version_mends_them(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    """What was read is gone from memory, so neither the one version nor the other can be had from what is there."""
    if form == "inexact":
        rank = Rank(tmp_path / "inexact", None, rank_layout(dtype="float32"))
        rank.memory["norm"][3] = 0.1
    update = rank.staged()
    with monkeypatch.context() as patch:
        dies = disk_that_gives(lambda number: True, None)
        reads = iter([os.preadv] * 3)
        patch.setattr(staged.os, "preadv", lambda *arguments: next(reads, dies)(*arguments))
        with pytest.raises(Mixed, match=r"the disk is broken.*the weights are mixed.*cannot be taken back") as found:
            update.commit()
        assert "bring a whole version" in str(found.value)
        with pytest.raises(Mixed):
            update.roll_back()
    assert not rank.runs_old
    assert not rank.runs_new
    update.close()
    rank.steps = rank.line.store.steps(None, 2)
    anew = rank.staged()
    anew.commit()
    assert rank.runs_new


def test_a_disk_that_comes_back_lets_a_mixed_update_be_taken_back(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    update = rank.staged()
    with monkeypatch.context() as patch:
        reads = iter([os.preadv] * 3)
        dies = disk_that_gives(lambda number: True, None)
        patch.setattr(staged.os, "preadv", lambda *arguments: next(reads, dies)(*arguments))
        with pytest.raises(Mixed):
            update.commit()
    update.roll_back()
    assert rank.runs_old


@pytest.mark.parametrize(("failing", "kind"), [("pwrite", NoRoom), ("fdatasync", TransferError)])
def test_a_disk_that_takes_no_more_says_so_at_the_stage(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, failing: str, kind: type[TransferError]
) -> None:
    number = errno.ENOSPC if kind is NoRoom else errno.EIO

    def broken(*_: object) -> int:
        raise OSError(number, "the disk is full or broken")

    with monkeypatch.context() as patch:
        patch.setattr(staged.os, failing, broken)
        with pytest.raises(kind, match="cannot be written"):
            rank.staged()
    assert rank.runs_old
    update = rank.staged()
    update.commit()
    assert rank.runs_new


def test_a_way_that_fits_in_memory_reads_no_disk_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, 1)
    update = rank.staged()
    monkeypatch.delattr(staged.os, "preadv")
    update.commit()
    assert rank.runs_new


def test_what_is_staged_has_no_name_and_ends_with_the_update(rank: Rank) -> None:
    objects = rank.line.store.folder / "objects"
    before = sorted(objects.iterdir())
    files = open_files()
    update = rank.staged()
    assert sorted(objects.iterdir()) == before
    assert open_files() == files + 1
    update.close()
    assert open_files() == files


def test_memory_that_cannot_be_read_any_more_takes_the_update_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails before a run is written has left nothing half-written."""
    rank = Rank(tmp_path, 1, rank_layout(dtype="float32"))
    update = rank.staged()
    real, reads = LiveWeights._read, 0  # type: ignore[attr-defined]

    def failing(*arguments: object) -> None:
        nonlocal reads
        reads += 1
        if reads == 4:
            raise RuntimeError("the device does not answer")
        real(*arguments)

    monkeypatch.setattr(LiveWeights, "_read", failing)
    with pytest.raises(RolledBack, match="does not answer"):
        update.commit()
    assert rank.runs_old


@pytest.mark.parametrize("budget", [2**26, 0], ids=["in memory", "in a file"])
@pytest.mark.parametrize("lane", [torch.int16, torch.int32])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_an_overwrite_becomes_the_steps_from_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: torch.dtype, share: float, budget: int
) -> None:
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", budget)
    elements = (TILES_AT_ONCE + 2) * TILE_ELEMENTS + 77
    generator = torch.Generator().manual_seed(5)
    new = torch.randint(-(2**15), 2**15, (elements,), generator=generator).to(lane)
    moved = torch.rand(elements, generator=generator) < share
    old = (new + moved * torch.randint(1, 9, (elements,), generator=generator)).to(lane)
    first, second = (tensor.numpy().view(f"<u{lane.itemsize}") for tensor in (old, new))
    deltas = StagedDeltas(tmp_path)
    deltas.make_room(0)
    deltas.put((0, 0), *rebased(overwrite(second, bucket_hash(second)), first.copy()))
    deltas.seal()
    steps = deltas.get((0, 0))
    assert steps.coded == int((first != second).sum())
    assert (steps.before, steps.after) == (bucket_hash(first), bucket_hash(second))
    held = first.copy()
    steps.apply(held, steps.before)
    assert (held == second).all()
    steps.undo(held, steps.after)
    assert (held == first).all()
    deltas.close()


def test_an_overwrite_that_does_not_leave_what_it_says_is_malformed() -> None:
    new = torch.zeros(1000, dtype=torch.int16).numpy().view("<u2")
    with pytest.raises(MalformedDelta, match="does not become"):
        rebased(overwrite(new, bucket_hash(new) + 1), new.copy())


def test_parts_move_to_the_file_as_soon_as_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a bucket as well; two of these fit, with their rows."""
    bits = torch.arange(6 * TILES_AT_ONCE * TILE_ELEMENTS).to(torch.int16).numpy().view("<u2")
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", 6 * TILES_AT_ONCE * TILE_ELEMENTS)
    head, parts = rebased(overwrite(bits, bucket_hash(bits)), bits ^ 0x5555)
    deltas = StagedDeltas(tmp_path)
    deltas.make_room(TILES_AT_ONCE * TILE_ELEMENTS)
    files = open_files()
    seen: list[int] = []

    def watched() -> Iterator[Streams]:
        for part in parts:
            seen.append(open_files() - files)
            yield part

    deltas.put((0, 0), head, watched())
    assert seen == [0, 0, 0, 1, 1, 1]
    assert deltas.get((0, 0)).coded == bits.size
    deltas.close()
    assert open_files() == files
