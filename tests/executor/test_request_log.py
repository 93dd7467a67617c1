"""The engine's own line of each request that it ended."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from rose_executor.child_log import ChildLog
from rose_executor.request_log import ended_line, log_ended
from rose_executor.token_page import RequestCount
from tests.conftest import EngineRig

COUNT = RequestCount(12, 3, 4, finished=True)


def test_the_line_says_what_the_engine_knows() -> None:
    line = ended_line("s1g0-2.4.0", COUNT, arrived_s=1_000.0, ended_s=1_001.25, set_back=2, why="stop")
    assert json.loads(line) == {
        "part": "engine",
        "request_id": "s1g0-2.4.0",
        "tokens": 12,
        "first_version": 3,
        "last_version": 4,
        "seconds": 1.25,
        "set_back": 2,
        "why": "stop",
        "event": "request ended",
        "level": "info",
        "timestamp": "1970-01-01T00:16:41.250000Z",
    }


def test_a_name_cannot_make_a_second_line() -> None:
    line = ended_line('a\n{"b": "\u2028\udcff', COUNT, arrived_s=0, ended_s=0, set_back=0, why="abort")
    assert line.count("\n") == 0
    assert json.loads(line)["request_id"] == 'a\n{"b": "\u2028\udcff'


def test_a_log_that_cannot_be_written_hurts_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        log_ended("a", COUNT, arrived_s=0, set_back=0, why="stop")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    log_ended("\udcff", COUNT, arrived_s=0, set_back=0, why="stop")
    assert json.loads(capfd.readouterr().out)["request_id"] == "\udcff"


def test_it_is_no_part_of_an_engines_last_words(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "log")
    line = ended_line("a", COUNT, arrived_s=0, ended_s=0, set_back=0, why="stop")
    log.path.write_text(f"ValueError: no room\n{line}\n" * 50)
    assert log.last_words() == ": ValueError: no room; last lines of its log:\nValueError: no room"


@pytest.mark.engine
def test_a_real_engine_writes_one_line_for_each_request(rig: EngineRig) -> None:
    before_s = time.time()
    out = rig.run(rig.route().generate("story-1.0.0", [5, 6, 7], max_tokens=9, temperature=1.0, stop_token_ids=()))
    lines = [
        json.loads(line) for line in rig.engine.settings.log_path.read_text().splitlines() if "story-1.0.0" in line
    ]
    (line,) = (one for one in lines if one["event"] == "request ended")
    assert (line["tokens"], line["why"], line["set_back"]) == (len(out.output_ids), "length", 0)
    assert line["first_version"] == line["last_version"] == rig.engine.page.version
    assert before_s <= datetime.fromisoformat(line["timestamp"]).timestamp() <= time.time()
    assert 0 < line["seconds"] < 600
