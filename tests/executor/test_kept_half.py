"""A half as a serving engine keeps it: a board that is not there, is another's, was made anew, or takes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rose_executor.board import SERVING_KV, BoardReader, HalfWriter, claim_quota
from rose_executor.board_states import ServingKv
from rose_executor.kept_half import LOOK_AGAIN_S, WRITE_AGAIN_S, KeptHalf

STATE = ServingKv(100, 50, 10)


class World:
    """A half on a clock of the test's own, and what is told of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "board"
        self.now_s = 100.0
        self.told: list[str] = []
        self.half = KeptHalf(self.path, SERVING_KV, self.told.append)

    def after(self, seconds: float) -> bool:
        """Whether a state stands on the board so much later."""
        self.now_s += seconds
        self.half.look(self.now_s)
        return self.half.write(STATE, self.now_s)

    def stands(self) -> bool:
        board = BoardReader(self.path)
        try:
            # The writer is asked for, because the clock of the board is none of the test's.
            return bool(board.read(SERVING_KV, 0.0).number)
        finally:
            board.close()


def test_a_board_that_comes_late_is_found_at_the_next_look_and_told_of_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.after(0.0)
    assert not world.after(LOOK_AGAIN_S)
    assert len(world.told) == 1
    assert world.half.boardless == world.told[0]
    assert "No such file" in world.told[0]
    claim_quota(world.path).close()
    assert not world.after(0.5 * LOOK_AGAIN_S)
    assert world.after(LOOK_AGAIN_S)
    assert world.half.boardless == ""
    assert world.stands()


def test_one_that_is_made_anew_is_followed(tmp_path: Path) -> None:
    world = World(tmp_path)
    claim_quota(world.path).close()
    assert world.after(0.0)
    world.path.unlink()
    claim_quota(world.path).close()
    assert world.after(LOOK_AGAIN_S)
    assert world.stands()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_one_that_takes_nothing_is_tried_again_seldom_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    attempts: list[float] = []
    world = World(tmp_path)
    claim_quota(world.path).close()

    def refused(writer: HalfWriter[ServingKv], state: ServingKv) -> None:
        attempts.append(world.now_s)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as full:
        full.setattr(HalfWriter, "write", refused)
        for _ in range(2000):
            assert not world.after(0.01)
    assert 20.0 / WRITE_AGAIN_S <= len(attempts) <= 20.0 / WRITE_AGAIN_S + 1
    assert world.told == [f"{world.path} cannot be written: {os.strerror(number)}"]
    assert world.half.boardless == world.told[0]
    assert world.after(WRITE_AGAIN_S)
    assert world.half.boardless == ""
    # Meanwhile the half was anybody's to write.
    world.half.close()
    HalfWriter(world.path, SERVING_KV).close()


def test_a_file_system_that_cannot_be_asked_is_no_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    claim_quota(world.path).close()
    assert world.after(0.0)

    def stale(writer: HalfWriter[ServingKv]) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as gone:
        gone.setattr(HalfWriter, "whole", stale)
        assert not world.after(LOOK_AGAIN_S)
        assert "Stale file handle" in world.half.boardless
    assert world.after(LOOK_AGAIN_S)
