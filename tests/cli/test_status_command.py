from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rose.cli import status as status_module
from rose.config import load_job
from rose.runs import open_run
from rose.status import STALE_AFTER_S, Liveness, OpenWait, Page, Part, RunStatus, StatusBoard
from rose.waits import WaitBoard

NOW_S = 1_000.0
PAGE = Page(
    run_id="demo-1",
    pid=7,
    output="/out/demo-1",
    started_s=900.0,
    written_s=999.0,
    write_failures=0,
    parts=[Part(name="engine-0", state="serving", detail="[bold]v3\x1b[2J", since_s=990.0)],
    facts={"step": 3, "success": 0.123456},
    waits=[
        OpenWait(what="turn", whom="engine-0", since_s=995.0, deadline_s=1_055.0),
        OpenWait(what="step", whom="environment t-1", since_s=700.0, deadline_s=990.0),
    ],
)


def shown(*runs: RunStatus) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(status_module.render(Path("/root"), list(runs), NOW_S))
    return out.getvalue()


def test_no_runs(rose: Any, runtime_dir: Path) -> None:
    ended = rose("status")
    assert (ended.status, ended.out) == (0, f"no runs (looked in {runtime_dir})\n")
    assert json.loads(rose("status", "--json").out) == []


def test_parts_facts_and_waits_with_since_and_deadline() -> None:
    text = shown(RunStatus("demo-1", Liveness.LIVE, 1.0, PAGE, ""))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "demo-1 live pid 7, said 1 s ago, output /out/demo-1"
    assert "step=3 success=0.1235" in lines
    assert "engine-0 serving 10.0 s [bold]v3 [2J" in lines
    assert "turn engine-0 5.0 s in 55.0 s" in lines
    assert "step environment t-1 5 min 10.0 s ago" in lines


def test_of_a_dead_run_nothing_is_shown_as_if_it_held() -> None:
    page = PAGE.model_copy(update={"facts": PAGE.facts | {"metrics": "http://127.0.0.1:9/metrics"}})
    text = shown(RunStatus("demo-1", Liveness.DEAD, 1.0, page, ""))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == [
        "demo-1 dead was pid 7, said 1 s ago, output /out/demo-1",
        "when it last spoke: step=3 success=0.1235",
        "engine-0 was serving [bold]v3 [2J",
        "waited for step from environment t-1",
        "waited for turn from engine-0",
        "",
    ]


def test_control_characters_never_reach_the_terminal() -> None:
    page = PAGE.model_copy(update={"output": "\x1b]0;title\x07", "facts": {"\x1b[31m": "\x1b[2J"}})
    for liveness in Liveness:
        assert "\x1b" not in shown(RunStatus("demo-1", liveness, 1.0, page, ""))


@pytest.mark.parametrize("liveness", list(Liveness))
def test_liveness_and_problems_are_told(liveness: Liveness) -> None:
    text = shown(RunStatus("demo-1", liveness, None, None, "status is damaged: file"))
    assert f"demo-1  {liveness.value}  status is damaged: file" in text


def test_an_empty_page_says_what_is_not_there() -> None:
    text = shown(RunStatus("a", Liveness.LIVE, 1.0, PAGE.model_copy(update={"parts": [], "waits": []}), ""))
    assert "no part has reported yet" in text
    assert "waits for nothing" in text


def test_waits_alike_are_one_line_with_the_oldest_and_the_first_deadline() -> None:
    now = PAGE.written_s
    waits = [
        OpenWait(what="answer", whom="engine-0", since_s=now - age_s, deadline_s=now + left_s)
        for age_s, left_s in ((1, 9), (7, 300), (2, 8))
    ]
    waits += [OpenWait(what="step", whom=f"environment e{i}", since_s=now - i, deadline_s=now + 20) for i in range(2)]
    text = shown(RunStatus("a", Liveness.LIVE, 1.0, PAGE.model_copy(update={"waits": waits}), ""))
    (answers,) = [line for line in text.splitlines() if "answer" in line]
    assert "engine-0 and 2 more" in answers
    (steps,) = [line for line in text.splitlines() if "step " in line]
    assert "environment e1 and 1 more" in steps


def test_failed_writes_are_told() -> None:
    page = PAGE.model_copy(update={"write_failures": 3})
    assert "3 status writes failed" in shown(RunStatus("a", Liveness.LIVE, 1.0, page, ""))


def test_a_real_run_live_and_stale(rose: Any, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = WaitBoard()
    with open_run(load_job(job_file), waits) as run:
        with StatusBoard(run, waits) as board:
            board.part("engine-0", "ready")
        assert f"{run.run_id}  live" in rose("status").out
        (found,) = json.loads(rose("status", "--json").out)
        assert (found["run_id"], found["liveness"], found["problem"]) == (run.run_id, "live", "")
        assert found["page"]["parts"][0]["name"] == "engine-0"
        now_s = time.time()
        monkeypatch.setattr(status_module.time, "time", lambda: now_s + STALE_AFTER_S + 1)
        assert f"{run.run_id}  stale" in rose("status").out


def test_watch_shows_again_until_interrupted(rose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, None])

    def sleep(_seconds: float) -> None:
        if next(looks, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    ended = rose("status", "--watch")
    assert ended.status == 0
    assert "no runs" in ended.out


def test_json_and_watch_exclude_each_other(rose: Any) -> None:
    ended = rose("status", "--json", "--watch")
    assert ended.status == 2
    assert "one of them" in ended.err


def test_a_runtime_folder_that_others_may_use_ends_with_3(rose: Any, runtime_dir: Path) -> None:
    runtime_dir.mkdir(mode=0o755)
    ended = rose("status")
    assert ended.status == 3
    assert "chmod 700" in ended.err
