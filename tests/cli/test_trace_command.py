"""One trajectory through all logs: whose lines count, in which order, and how they are told."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rose.cli.trail import Footprint, footprints, newest_run

BEGAN_S = 1_800_000_000.0
RUN = "lake-20270115-080000-0001"


def line(at_s: float, event: str, **values: Any) -> str:
    stamp = datetime.fromtimestamp(BEGAN_S + at_s, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"part": "p", **values, "event": event, "level": "info", "timestamp": stamp}) + "\n"


def write(path: Path, *lines: str, written_s: float = 100.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    os.utime(path, (BEGAN_S + written_s,) * 2)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with its scheduler and engine, an executor beside it, and what is not of this run."""
    out = tmp_path / "runs"
    run = out / RUN
    write(run / "job.toml", "")
    write(
        run / "log.jsonl",
        line(0, "begins"),
        line(2, "turn sampled", request_id="s1g0-1.0.0", tokens=7),
        line(2.5, "turn sampled", request_id="s1g0-10.0.0"),
        line(4, "trajectory ended", trajectory_id="s1g0-1", group_id="s1g0", outcome="completed"),
        line(5, "update", version=1, trained=["s1g0-0", "s1g0-1"], zero_variance=["s1g1-0"]),
        line(9, "ends"),
    )
    write(
        run / "scheduler-20270115-080001-0002" / "log.jsonl",
        line(1, "lease granted", trajectory_id="s1g0-1", engine_id="engine-0"),
        line(3, "lease ended", trajectory_id="as1g0-1"),
    )
    write(
        run / "engine-0.log",
        "INFO 01-15 s1g0-1 before any time\n",
        line(1.5, "request ended", request_id="s1g0-1.0.0", tokens=7),
        "(EngineCore) ERROR s1g0-1.0.0 was odd\n",
        '{"torn s1g0-1\n',
    )
    executor = out / "executor-20270115-075900-0003"
    write(
        executor / "guest.log",
        line(-50, "request ended", request_id="s1g0-1.1.0"),
        line(3, "request ended", request_id="s1g0-1.1.0"),
        line(500, "request ended", request_id="s1g0-1.1.0"),
    )
    write(out / "old-20270101-000000-0004" / "log.jsonl", line(3, "stale", trajectory_id="s1g0-1"), written_s=-10)
    other = out / "other-20270115-080000-0005"
    write(other / "job.toml", "", written_s=-20)
    write(other / "log.jsonl", line(3, "another run's", trajectory_id="s1g0-1"), written_s=50)
    write(other / "scheduler-20270115-080001-0006" / "log.jsonl", line(3, "another's", trajectory_id="s1g0-1"))
    nested = out / "demo-20270115-080000-0008" / "lake-20270115-080003-0009"
    write(nested / "job.toml", "", written_s=-20)
    write(nested / "log.jsonl", line(3, "a nested run's", trajectory_id="s1g0-1"), written_s=50)
    write(nested / "scheduler-20270115-080001-0010" / "log.jsonl", line(3, "its", trajectory_id="s1g0-1"))
    (out / "current").symlink_to(executor)  # whoever likes a shorter name for it does not see everything twice
    return out


def told(found: list[Footprint]) -> list[tuple[str, str]]:
    return [(step.source, str(step.values.get("event", step.text))) for step in found]


def test_all_logs_of_the_run_and_of_services_beside_it_in_the_order_of_time(out: Path) -> None:
    assert told(footprints("s1g0-1", out / RUN)) == [
        ("engine-0", "INFO 01-15 s1g0-1 before any time"),
        ("scheduler", "lease granted"),
        ("engine-0", "request ended"),
        ("engine-0", "(EngineCore) ERROR s1g0-1.0.0 was odd"),
        ("engine-0", '{"torn s1g0-1'),
        ("run", "turn sampled"),
        ("executor/guest", "request ended"),
        ("run", "trajectory ended"),
        ("run", "update"),
    ]


def test_a_group_is_followed_by_its_id_too(out: Path) -> None:
    assert told(footprints("s1g0", out / RUN)) == [("run", "trajectory ended")]


def test_ids_that_only_begin_or_end_alike_are_others(out: Path) -> None:
    assert told(footprints("s1g0-10", out / RUN)) == [("run", "turn sampled")]
    assert footprints("g0-1", out / RUN) == []
    assert footprints("s1g0-.", out / RUN) == []


def test_a_run_without_a_log_of_its_own_still_has_those_of_its_parts(out: Path) -> None:
    (out / RUN / "log.jsonl").unlink()
    assert ("scheduler", "lease granted") in told(footprints("s1g0-1", out / RUN))


def test_a_folder_without_a_job_file_is_read_once_too(out: Path) -> None:
    (out / RUN / "job.toml").unlink()
    assert len(footprints("s1g0-1", out / RUN)) == 9


def test_the_last_line_of_a_run_that_was_killed_may_be_torn(out: Path) -> None:
    with (out / RUN / "log.jsonl").open("a") as log:
        log.write('{"part": "torn')
    sources = [source for source, _ in told(footprints("s1g0-1", out / RUN))]
    assert sources.count("executor/guest") == 1
    (out / RUN / "log.jsonl").write_text("no time at all\n")
    sources = [source for source, _ in told(footprints("s1g0-1", out / RUN))]
    assert sources.count("executor/guest") == 3


def test_a_run_in_the_folder_of_the_service_that_started_it(out: Path, tmp_path: Path) -> None:
    director = tmp_path / "demo-20270115-075800-0007"
    out.rename(director)
    write(director / "log.jsonl", line(6, "load begins", told_of="s1g0-1"))
    found = told(footprints("s1g0-1", director / RUN))
    assert ("run", "load begins") not in found
    assert ("demo", "load begins") in found
    assert newest_run(tmp_path) == director / RUN


def test_the_newest_run_is_the_one_that_was_written_to_last(out: Path) -> None:
    assert newest_run(out) == out / RUN
    os.utime(out / "other-20270115-080000-0005" / "log.jsonl", (BEGAN_S + 200,) * 2)
    assert newest_run(out) == out / "other-20270115-080000-0005"
    assert newest_run(out / "nowhere") is None


def test_the_command_tells_a_story(rose: Any, out: Path) -> None:
    ended = rose("trace", "s1g0-1", "--run", str(out / RUN))
    assert ended.status == 0, ended.err
    lines = [" ".join(one.split()) for one in ended.out.splitlines()]
    assert lines[0] == f"s1g0-1 {RUN}, 9 lines"
    assert lines[1] == "engine-0 INFO 01-15 s1g0-1 before any time"
    assert lines[2] == "+0.000 s 08:00:01 scheduler lease granted engine_id=engine-0"
    assert lines[6] == "+1.000 s 08:00:02 run turn sampled request_id=s1g0-1.0.0 tokens=7"
    assert lines[-1] == "+4.000 s 08:00:05 run update version=1 trained=2 with this one"


def test_the_newest_run_is_taken_if_none_is_named(rose: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out.parent)
    assert f"s1g0-1  {RUN}" in rose("trace", "s1g0-1").out


def test_what_cannot_be_followed_is_told_with_what_to_do(rose: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = rose("trace", "s9g9-9", "--run", str(out / RUN))
    assert unknown.status == 2
    assert "speaks of s9g9-9" in unknown.err
    assert "s1g0-0" in unknown.err
    nowhere = rose("trace", "s1g0-1", "--run", str(out / "nothing"))
    assert (nowhere.status, "no run in" in nowhere.err) == (2, True)
    monkeypatch.chdir(out)
    assert rose("trace", "s1g0-1").status == 2


def test_control_characters_and_whole_pages_stay_out_of_the_terminal(rose: Any, out: Path) -> None:
    write(out / RUN / "log.jsonl", line(1, "\x1b[2Jx", trajectory_id="s2g0-0", why="y" * 5_000 + "\x1b]0;t\x07"))
    ended = rose("trace", "s2g0-0", "--run", str(out / RUN))
    assert "\x1b" not in ended.out
    assert 300 < ended.out.count("y") < 1_000
