from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ClusterError, ConfigError
from rose.workload import record_file
from rose.workload.load_record import LoadRecord, Outcome, from_values, to_line
from rose.workload.record_file import RecordReader, RecordWriter, read_replay


def record(index: int) -> LoadRecord:
    return LoadRecord(
        index,
        Outcome.COMPLETED,
        due_s=1.5,
        ended_s=2.25,
        prompt_tokens=7,
        asked_tokens=3,
        tokens=3,
        sent_s=1.5,
        first_s=2.0,
        last_s=2.25,
        gaps_s=(0.125, 0.125),
        loop_lag_s=0.5,
    )


TIMES = st.integers(0, 10**9).map(lambda number: number / 10**6)


@given(st.sampled_from(Outcome), TIMES, TIMES, st.lists(TIMES, max_size=5), st.text(max_size=300))
def test_a_line_is_read_as_it_was_written(
    outcome: Outcome, due_s: float, ended_s: float, gaps_s: list[float], detail: str
) -> None:
    one = LoadRecord(3, outcome, due_s, ended_s, 5, 9, 2, due_s, due_s, ended_s, tuple(gaps_s), 0.25, detail)
    line = to_line(one)
    assert line.count(b"\n") == 1
    assert from_values(json.loads(line)) == one


def test_a_replay_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    writer = RecordWriter(path, {"trace": "t"})
    for index in range(100):
        writer.add(record(index))
    writer.close({"signal": 0})
    replay = read_replay(path)
    assert replay.records == [record(index) for index in range(100)]
    assert replay.head == {"kind": "head", "trace": "t"}
    assert replay.end == {"kind": "end", "signal": 0}
    assert (replay.unreadable, writer.lost) == (0, 0)


def test_a_reader_follows_and_leaves_a_torn_line_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = [to_line(record(index)) for index in range(3)]
    path.write_bytes(lines[0] + lines[1][:30])
    reader = RecordReader(path)
    assert reader.read() == [record(0)]
    assert reader.read() == []
    path.write_bytes(lines[0] + lines[1] + lines[2])
    assert reader.read() == [record(1), record(2)]
    assert reader.replay.records == [record(0), record(1), record(2)]
    assert reader.replay.end is None


def test_lines_that_are_no_records_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    wrong = [b"{", b"7", b"\xff\xfe", b'{"index":1}', to_line(record(1)).replace(b"completed", b"pleased").strip()]
    path.write_bytes(b"\n".join([*wrong, to_line(record(2))]))
    replay = read_replay(path)
    assert (replay.records, replay.unreadable) == ([record(2)], 5)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists"):
        RecordWriter(path, {})
    assert path.read_text() == "precious"
    with pytest.raises(ClusterError, match="cannot be made"):
        RecordWriter(path / "below", {})
    with pytest.raises(ConfigError, match="No such file"):
        read_replay(tmp_path / "none")


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    room: list[int] = []
    refused = threading.Event()
    write = os.write

    def filling(fd: int, data: bytes) -> int:
        if not room:
            return write(fd, data)
        if (left := room.pop()) > 0:
            room.append(0)
            return write(fd, data[:left])
        refused.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_file.os, "write", filling)
    writer = RecordWriter(path, {})
    writer.add(record(0))
    while path.read_bytes().count(b"\n") < 2:
        time.sleep(0.001)
    room.append(10)
    writer.add(record(1))
    assert refused.wait(10)
    writer.add(record(2))
    writer.close({})
    replay = read_replay(path)
    # The torn line stands alone; the next begins on a fresh one.
    assert replay.records == [record(0), record(2)]
    assert (writer.lost, replay.unreadable) == (1, 1)
    assert isinstance(writer.failure, OSError)


def test_a_disk_that_stands_still_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "BUFFER_LINES", 10)
    go_on = threading.Event()
    write = os.write

    def stuck(fd: int, data: bytes) -> int:
        go_on.wait(30)
        return write(fd, data)

    monkeypatch.setattr(record_file.os, "write", stuck)
    writer = RecordWriter(tmp_path / "records.jsonl", {})
    for index in range(100):
        writer.add(record(index))
    # One may be with the thread already, beside the ten that are buffered.
    assert 89 <= writer.lost <= 91
    lost = writer.lost
    go_on.set()
    writer.close({})
    assert len(read_replay(tmp_path / "records.jsonl").records) == 100 - lost


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    code = f"""
import itertools, pathlib
from rose.workload.record_file import RecordWriter
from rose.workload.load_record import LoadRecord, Outcome
writer = RecordWriter(pathlib.Path({str(path)!r}), {{}})
for index in itertools.count():
    writer.add(LoadRecord(index, Outcome.TIMED_OUT, 0.0, 1.0, 1, 1))
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not path.exists() or path.stat().st_size < 100_000:
            assert child.poll() is None
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    replay = read_replay(path)
    assert len(replay.records) > 500
    assert (replay.unreadable, replay.end) == (0, None)
