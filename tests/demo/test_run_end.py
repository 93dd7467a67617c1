"""A run that failed is spoken of by the demo itself, with its cause, and with where to look further."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.demo import director
from rose.demo.cores import Placing, split_cores
from rose.demo.director import Director
from rose.demo.plan import shipped_plan
from rose.demo.run_end import LOG, REPORT, failure_of
from rose.errors import ClusterError
from rose.report.model import LedgerSummary, RunReport
from rose.slo import Slo
from rose.waits import WaitBoard


def write_report(folder: Path, cause: str = "") -> None:
    ledger = LedgerSummary(accounts={}, generated=0)
    report = RunReport(
        run_id="r", name="r", started_at="", wall_s=9.0, outcome="stopped" if cause else "finished", cause=cause,
        ledger=ledger, versions_published=0, phases=(),
    )  # fmt: skip
    (folder / REPORT).write_text(report.model_dump_json(), encoding="utf-8")


def test_of_one_that_ended_well_nothing_is_said(tmp_path: Path) -> None:
    write_report(tmp_path)
    assert failure_of(0, "ended with 0", tmp_path) == ""


def test_one_that_failed_is_told_with_its_cause(tmp_path: Path) -> None:
    write_report(tmp_path, "cluster: Ray is gone")
    said = failure_of(3, "ended with 3", tmp_path)
    assert said == f"the run ended with 3: cluster: Ray is gone; its log: {tmp_path / LOG}"


def test_one_that_failed_though_its_report_knows_of_nothing(tmp_path: Path) -> None:
    write_report(tmp_path)
    assert failure_of(1, "ended with 1", tmp_path) == f"the run ended with 1; its log: {tmp_path / LOG}"


@pytest.mark.parametrize(("status", "death"), [(-6, "was killed by SIGABRT"), (1, "ended with 1"), (0, "ended with 0")])
def test_the_demo_fails_with_a_run_that_left_no_report_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, death: str
) -> None:
    said: list[str] = []

    async def check() -> int:
        run = GoneRun(status, death)
        monkeypatch.setattr(director, "start_child", lambda *_: _soon(run))
        monkeypatch.setattr(director, "page_of", lambda *_: _soon(SimpleNamespace(run_id="r", output=str(tmp_path))))
        monkeypatch.setattr(director, "fact_of", no_fact)
        async with contextlib.AsyncExitStack() as stack:
            ended, _ = await _director(tmp_path, said)._share(stack, NoLoad(), Slo(1.0, 1.0))  # type: ignore[arg-type]
        return ended

    assert asyncio.run(check()) == (status or 1)
    assert said == [f"the run {death}, and left no report; its log: {tmp_path / LOG}"]


@dataclass
class GoneRun:
    """A run that has ended already."""

    status: int
    how: str
    pid: int = 1

    @property
    def exit_code(self) -> int:
        return self.status

    async def wait(self) -> int:
        await asyncio.sleep(0)  # whoever looks for what it lends learns of its end first
        return self.status

    def death(self) -> str:
        return self.how

    async def stop(self, *_: object) -> None: ...


async def no_fact(*_: object) -> str:
    raise ClusterError("the run ended before it had told about itself")


class NoLoad:
    """Load clients that ask for nothing."""

    async def again(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None: ...


def _director(out: Path, said: list[str]) -> Director:
    board: Any = SimpleNamespace(part=lambda *_: None, fact=lambda *_: None)
    nothing: Any = None
    job: Any = SimpleNamespace(run=SimpleNamespace(out=out))
    placing = Placing(split_cores(os.sched_getaffinity(0) | {0, 1}), yields=False)
    return Director(shipped_plan(out), nothing, job, nothing, board, WaitBoard(), placing, said.append)


async def _soon(found: Any) -> Any:
    return found
