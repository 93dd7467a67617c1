from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from rose import status
from rose.config import Job
from rose.runs import FoundRun, Run, open_run
from rose.status import STALE_AFTER_S, Fact, Liveness, Page, StatusBoard, read_status
from rose.waits import WaitBoard


@pytest.fixture
def run(job: Job, runtime_dir: Path, waits: WaitBoard) -> Iterator[Run]:
    with open_run(job, waits) as run:
        yield run


def read(run: Run, *, alive: bool = True, later_s: float = 0.0) -> status.RunStatus:
    return read_status(FoundRun(run.run_id, run.runtime, alive), time.time() + later_s)


def written(run: Run) -> Page:
    page = read(run).page
    assert page is not None, read(run).problem
    return page


def until(holds: threading.Event) -> None:
    assert holds.wait(10), "never happened"


def test_the_last_page_holds_parts_facts_and_waits(run: Run, waits: WaitBoard) -> None:
    with waits.waiting("engine start", "engine-0", 30), StatusBoard(run, waits) as board:
        board.part("engine-0", "starting", "import")
        board.fact("step", 3)
        board.fact("success", 0.25)
    page = written(run)
    assert (page.run_id, page.output) == (run.run_id, str(run.output))
    assert [(part.name, part.state, part.detail) for part in page.parts] == [("engine-0", "starting", "import")]
    assert page.facts == {"step": 3, "success": 0.25}
    assert [(wait.what, wait.whom) for wait in page.waits] == [("engine start", "engine-0")]
    assert page.waits[0].deadline_s - page.waits[0].since_s == pytest.approx(30)


def test_since_moves_only_with_the_state(run: Run, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr(status.time, "time", lambda: next(clock))
    board = StatusBoard(run, waits)
    board.part("trainer", "rollout", "1 of 8")
    board.part("trainer", "rollout", "2 of 8")
    first = board.page().parts[0]
    board.part("trainer", "update")
    assert (first.since_s, first.detail) == (10.0, "2 of 8")
    assert board.page().parts[0].since_s == 30.0


def test_a_state_may_be_an_enum(run: Run, waits: WaitBoard) -> None:
    class State(StrEnum):
        READY = "ready"

    board = StatusBoard(run, waits)
    board.part("engine-0", State.READY)
    assert Page.model_validate_json(board.page().model_dump_json()).parts[0].state == "ready"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(True, True), (None, None), (float("nan"), None), ("\ud800", "\\ud800"), (np.float64(0.5), 0.5)],
)
def test_a_fact_of_any_kind_reaches_the_reader(run: Run, waits: WaitBoard, value: Fact, shown: Fact) -> None:
    with StatusBoard(run, waits) as board:
        board.fact("it", value)
        board.part("part\ud800", "state", "\udfff")
    assert written(run).facts["it"] == shown
    assert written(run).parts[0].name == "part\\ud800"


def test_a_page_is_written_on_change_only(run: Run, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(status, "HEARTBEAT_S", 1e9)
    looked = threading.Semaphore(0)
    pages: list[Page] = []

    class Watched(StatusBoard):
        def page(self) -> Page:
            looked.release()
            return super().page()

        def _write(self, page: Page) -> None:
            pages.append(page)

    with Watched(run, waits):
        for _ in range(20):
            assert looked.acquire(timeout=10)
        assert len(pages) == 1
        with waits.waiting("x", "y", 1):
            for _ in range(3):
                assert looked.acquire(timeout=10)
    assert [len(page.waits) for page in pages] == [0, 1, 0]


def test_the_heartbeat_writes_an_unchanged_page(run: Run, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(status, "HEARTBEAT_S", 0.0)
    wrote = threading.Semaphore(0)
    monkeypatch.setattr(StatusBoard, "_write", lambda *_: wrote.release())
    with StatusBoard(run, waits):
        for _ in range(5):
            assert wrote.acquire(timeout=10)


def test_writes_that_fail_are_counted_told_once_and_survived(
    run: Run, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(status, "HEARTBEAT_S", 0.0)
    failed = threading.Event()
    blocker = run.runtime / "status.json"
    blocker.mkdir()  # a file cannot replace a folder
    with StatusBoard(run, waits) as board:

        def watch() -> None:
            while board.write_failures < 3:
                time.sleep(0.001)
            failed.set()

        threading.Thread(target=watch, daemon=True).start()
        until(failed)
        # It is there for as long as one write takes, and not for good.
        while (run.runtime / "status.new").exists():
            time.sleep(0.0001)
        blocker.rmdir()
    assert written(run).write_failures >= 3
    assert len([record for record in caplog.records if "status cannot be written" in str(record.msg)]) == 1


def test_a_disk_that_can_be_read_alone_does_not_end_the_writing(
    run: Run, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(status, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(status, "HEARTBEAT_S", 0.0)
    with StatusBoard(run, waits) as board:
        with monkeypatch.context() as read_only:
            read_only.setattr(Path, "write_text", refuses)
            read_only.setattr(Path, "unlink", refuses)
            deadline_s = time.monotonic() + 30.0
            while board.write_failures < 3 and time.monotonic() < deadline_s:
                time.sleep(0.001)
        assert board._thread.is_alive()
    assert written(run).write_failures >= 3


def test_closing_twice_and_closing_unstarted_are_harmless(run: Run, waits: WaitBoard) -> None:
    board = StatusBoard(run, waits)
    board.close()
    with StatusBoard(run, waits) as started:
        pass
    started.close()


def test_live_stale_and_dead(run: Run, waits: WaitBoard) -> None:
    assert read(run).liveness is Liveness.STALE
    assert read(run).problem == "no status written yet"
    with StatusBoard(run, waits):
        pass
    assert read(run).liveness is Liveness.LIVE
    stale = read(run, later_s=STALE_AFTER_S + 1)
    assert stale.liveness is Liveness.STALE
    assert stale.age_s == pytest.approx(STALE_AFTER_S + 1, abs=5)
    assert read(run, alive=False).liveness is Liveness.DEAD


def test_a_torn_page_is_a_problem_wherever_it_ends(run: Run, waits: WaitBoard) -> None:
    board = StatusBoard(run, waits)
    board.part("engine-0", "ready", "é")
    whole = board.page().model_dump_json().encode()
    for end in range(0, len(whole), 3):
        (run.runtime / "status.json").write_bytes(whole[:end])
        found = read(run)
        assert found.page is None
        assert found.problem.startswith("status is damaged")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "status of another version of rose: format 2, this one reads 1"),
        ({"parts": 3}, "status is damaged: parts"),
        ({"pid": "x"}, "status is damaged: pid"),
        ({"facts": {"a": [1]}}, "status is damaged: facts.a"),
    ],
)
def test_a_page_that_is_not_ours_is_a_problem(
    run: Run, waits: WaitBoard, change: dict[str, object], problem: str
) -> None:
    page = json.loads(StatusBoard(run, waits).page().model_dump_json()) | change
    (run.runtime / "status.json").write_text(json.dumps(page))
    assert read(run).problem.startswith(problem)


def test_what_cannot_be_read_is_a_problem(run: Run) -> None:
    (run.runtime / "status.json").mkdir()
    assert read(run).problem.startswith("status cannot be read")


def test_a_write_that_ends_half_way_leaves_the_page_before(
    run: Run, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = StatusBoard(run, waits)
    board.fact("step", 1)
    board._write(board.page())
    real = Path.write_text

    def half(path: Path, text: str, **kwargs: str) -> int:
        real(path, text[: len(text) // 2], **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    board.fact("step", 2)
    board._write(board.page())
    assert written(run).facts == {"step": 1}
    assert board.write_failures == 1
