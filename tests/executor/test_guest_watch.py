"""The watch over a real board: it writes what the rules decide, mends the board, and tells what it cannot do."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.errors import ClusterError
from rose.slo import Slo
from rose_executor.board import GUEST, QUOTA, SERVING, SERVING_KV, BoardReader, HalfWriter
from rose_executor.board_halves import encode
from rose_executor.board_states import GuestState, Quota, ServingKv, ServingState
from rose_executor.guest_rules import GuestRules
from rose_executor.guest_watch import GuestWatch
from rose_executor.kv_budget import FixedBlocks, KvBudget
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.partition_terms import Partition, Role
from rose_executor.slack import SlackPolicy

POLICY = SlackPolicy(Slo(ttft_s=0.4, tpot_s=0.05), tokens_max=256, seqs_max=64)
SHUT = Quota(77, 256, 64, gate_open=False, ttft_s=0.4, tpot_s=0.05)


class Brake:
    """A partitioner that counts how often it was told to freeze."""

    def __init__(self) -> None:
        self.frozen = 0
        self.broken = False

    def place(self, pid: int, role: Role) -> None:
        raise AssertionError("nobody is placed by a watch")

    def freeze(self) -> None:
        self.frozen += 1
        if self.broken:
            raise ClusterError("the brake is broken")

    def thaw(self) -> None:
        raise AssertionError("nobody is thawed by a watch")

    def renew_watchdog(self) -> bool:
        raise AssertionError("no watchdog is looked after by a watch")

    def describe(self) -> Partition:
        return Partition("brake", "", "", 1.0, holds=True)

    def close(self) -> None:
        pass

    def set_share(self, share: float | None) -> None:
        raise AssertionError("no share is changed here")

    def guest_env(self) -> dict[str, str | None]:
        return {}

    def release(self, pid: int) -> None:
        pass


def watch(path: Path, brake: Brake | None = None) -> GuestWatch:
    return GuestWatch(path, GuestRules(POLICY, FixedBlocks(77)), brake or Brake())


def idle() -> ServingState:
    return ServingState(steps=9, stepped_at_s=time.monotonic(), kv_blocks_total=100)


def quota(path: Path) -> Quota | None:
    return BoardReader(path).read(QUOTA, time.monotonic()).state


def test_an_idle_serving_engine_opens_the_gate_and_its_silence_shuts_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    watching = watch(path)
    assert watching.look()
    assert quota(path) == SHUT
    serving = HalfWriter(path, SERVING)
    serving.write(idle())
    assert watching.look()
    assert quota(path) == SHUT._replace(gate_open=True)
    # What an hour of silence looks like: the half was last written long ago.
    os.pwrite(serving._fd, bytes(512), SERVING.offset)
    assert watching.look()
    assert watching.seen is not None
    assert watching.seen.serving.why == "the serving half was never written"
    given = quota(path)
    assert given is not None
    assert not given.gate_open


@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_a_harmed_board_is_mended(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "board"
    watching = watch(path)
    watching.look()
    if harm == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    for _ in range(20):
        assert watching.look()
        time.sleep(0.005)
    assert quota(path) == SHUT
    assert watching.trouble == ""


def test_a_board_that_goes_again_while_it_is_made_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "board"
    watching = watch(path)
    path.unlink()
    watching._whole_at_s = 0.0
    with monkeypatch.context() as patched:
        patched.setattr("rose_executor.guest_watch.BoardReader", gone)
        for _ in range(2):
            assert not watching.look()
            assert "cannot open the board" in watching.trouble
    assert watching.look()
    assert quota(path) == SHUT


def test_a_file_that_takes_the_place_of_the_board_is_left_alone_and_told(tmp_path: Path) -> None:
    path, content = tmp_path / "board", bytes(4096) + b"x" * 4096
    watching = watch(path)
    assert watching.look()
    (tmp_path / "image").write_bytes(content)
    (tmp_path / "image").rename(path)
    watching._whole_at_s = 0.0
    for _ in range(2):
        assert not watching.look()
        assert "is something else than a board" in watching.trouble
    assert path.read_bytes() == content
    path.unlink()
    assert watching.look()
    while quota(path) is None:
        assert watching.look()
    assert quota(path) == SHUT


def test_a_quota_whose_count_is_at_its_end_keeps_no_executor_from_its_board(tmp_path: Path) -> None:
    path = tmp_path / "board"
    watch(path).close()
    with path.open("r+b") as file:
        file.seek(QUOTA.offset)
        file.write(encode(QUOTA, SHUT._replace(gate_open=True), 2**63 - 1, time.monotonic_ns()))
    watching = watch(path)
    assert watching.look(), watching.trouble
    assert quota(path) == SHUT


def test_a_quota_that_no_board_holds_is_trouble_and_no_end(tmp_path: Path) -> None:
    path = tmp_path / "board"
    blocks = FixedBlocks(2**63)
    watching = GuestWatch(path, GuestRules(POLICY, blocks), Brake())
    assert not watching.look()
    assert "cannot stand on a board" in watching.trouble


def gone(path: Path) -> BoardReader:
    raise ClusterError(f"cannot open the board {path}")


def test_trouble_with_the_board_is_told_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    watching = watch(path)
    path.unlink()
    path.mkdir()
    for _ in range(3):
        assert not watching.look()
        assert "cannot open the board" in watching.trouble
    path.rmdir()
    assert watching.look()
    assert watching.trouble == ""


def test_a_full_file_system_is_told_and_the_board_comes_back_with_room(tmp_path: Path) -> None:
    path = tmp_path / "board"
    watching = watch(path)
    assert watching.look()
    os.truncate(path, 0)
    watching._whole_at_s = 0.0
    with no_room():
        for _ in range(2):
            assert not watching.look()
            assert watching.trouble == f"cluster: cannot make the board {path}: File too large"
    assert quota(path) is None
    while quota(path) is None:
        assert watching.look()
    assert watching.trouble == ""
    assert quota(path) == SHUT


@contextmanager
def no_room() -> Iterator[None]:
    """The kernel lets this process make no file larger than that: how it refuses is as on a full file system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_second_executor_is_refused(tmp_path: Path) -> None:
    first = watch(tmp_path / "board")
    with pytest.raises(ClusterError, match="has a live writer"):
        watch(tmp_path / "board")
    first.close()
    watch(tmp_path / "board").close()


@pytest.mark.parametrize("broken", [False, True])
def test_a_guest_that_does_not_obey_is_frozen_and_a_broken_brake_is_told(
    tmp_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_executor.guest_rules.OBEY_S", 0.0)
    brake = Brake()
    brake.broken = broken
    watching = watch(tmp_path / "board", brake)
    guest = HalfWriter(tmp_path / "board", GUEST)
    troubles = []
    for computed in (0, 0, 3, 3):
        guest.write(GuestState(steps=computed, computed_steps=computed, running=1))
        watching.look()
        troubles.append(watching.trouble)
    assert brake.frozen == 1
    assert [bool(trouble) for trouble in troubles] == [False, False, broken, False]


def test_each_cut_of_the_guests_memory_is_in_the_log_with_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "board"
    budget = KvBudget(KvPolicy(KvPool(pool_bytes=1000, serving_bytes=1000, guest_bytes=800)))
    watching = GuestWatch(path, GuestRules(POLICY, budget), Brake())
    HalfWriter(path, SERVING).write(idle())
    serving_kv = HalfWriter(path, SERVING_KV)
    with caplog.at_level(logging.INFO):
        for resident_bytes in (0, 500, 500, 800):
            serving_kv.write(ServingKv(total_bytes=1000, resident_bytes=resident_bytes))
            assert watching.look()
    told = [line for line in caplog.messages if "memory is cut" in line]
    assert ["serving uses 500 bytes" in line for line in told] == [True, False]
    assert "serving uses 800 bytes" in told[-1]
