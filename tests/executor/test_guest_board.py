"""A guest's side of the board, where the board becomes something else."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from rose_executor.board import GUEST, QUOTA, claim_quota
from rose_executor.board_states import GuestState, Quota
from rose_executor.guest_board import GuestBoard

BLOCKS = Quota(7, 8, 9, gate_open=True)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a file", "a pipe"])
def test_what_takes_the_place_of_the_board_is_looked_at_again_and_again_and_keeps_nothing_open(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "board"
    quota = claim_quota(path)
    board = GuestBoard(path)
    quota.close()
    path.unlink()
    if kind == "a file":
        path.write_bytes(b"another layout" * 400)
    else:
        os.mkfifo(path)
    before = open_files()
    for tick in range(10):
        assert board.look(1e6 + tick).quota is None
    assert open_files() == before
    path.unlink()
    quota = claim_quota(path)
    board.look(2e6)
    quota.write(BLOCKS)
    reading = board._reader.read(QUOTA, time.monotonic())
    assert reading.state == BLOCKS
    quota.close()


def test_what_the_boards_file_is_made_into_is_not_written_to(tmp_path: Path) -> None:
    """In its place, under its name: no other file has it, so there is nothing to follow."""
    path, content = tmp_path / "board", b"another's data" * 400
    claim_quota(path).close()
    board = GuestBoard(path)
    board.report(GuestState(steps=1))
    path.write_bytes(content)
    assert board.look(1e6).quota is None
    board.report(GuestState(steps=2))
    assert path.read_bytes() == content
    path.write_bytes(b"")
    claim_quota(path).close()
    board.look(2e6)
    board.report(GuestState(steps=3))
    reading = board._reader.read(GUEST, time.monotonic())
    assert reading.state == GuestState(steps=3)


def test_a_board_that_was_cut_and_is_whole_again_with_a_quota_is_written_to_again(tmp_path: Path) -> None:
    path = tmp_path / "board"
    claim_quota(path).close()
    board = GuestBoard(path)
    path.write_bytes(b"")
    now_s = time.monotonic()
    assert board.look(now_s + 10.0).quota is None
    with contextlib.closing(claim_quota(path)) as executor:
        executor.write(Quota(1, 1, 1, gate_open=True))
        assert board.look(time.monotonic()).quota is not None
        board.report(GuestState(steps=3))
    assert board._reader.read(GUEST, time.monotonic()).state == GuestState(steps=3)
