"""A guest's side of the board, where the board becomes something else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rose_executor.board import QUOTA, claim_quota
from rose_executor.board_states import Quota
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
