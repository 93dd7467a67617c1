"""Whole sessions on a real engine, and what breaks in them: every token stays accounted for, every cause is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from certificate_tools import make_authority
from guest_engine import a_guest
from local_crew import open_local_crew
from stand_ins import a_job

from rose.errors import ClusterError, EngineError, RoseError, TrainingError, TransferError
from rose.ledger import Account
from rose.logs import logger, open_log
from rose.metrics import Metrics
from rose.records import Outcome, Trajectory
from rose.report.model import RunReport
from rose.report.write import write_report
from rose.runs import Run
from rose.status import StatusBoard
from rose.trainer import actor_rank
from rose.trainer.books import Books
from rose.trainer.crew import OpenCrew, open_crew
from rose.trainer.recorder import Recorder
from rose.trainer.session import Session
from rose.waits import WaitBoard
from rose_executor import supervisor
from rose_executor.page_reader import PageReader

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG_TURNS: dict[str, dict[str, Any]] = {
    "rollout": {"max_new_tokens": 200},
    "environment": {"params": {"max_turns": 2}},
    "train": {"steps": 1, "learning_rate": 1e-6},
    "evaluation": {"episodes": 2},
    "weights": {"parity_every_steps": 0},
}


class WatchingRecorder(Recorder):
    """Keeps the trajectories."""

    def trajectories(self, finished: Any) -> None:
        self.seen: list[Trajectory] = [*getattr(self, "seen", []), *finished]
        super().trajectories(finished)


@dataclass
class Played:
    """A session that has ended."""

    report: RunReport
    failure: RoseError | None
    trajectories: list[Trajectory]
    parts: list[tuple[str, str, str]]
    states: dict[str, list[str]]

    def balanced(self) -> RunReport:
        ledger = self.report.ledger
        assert (ledger.gap, ledger.violations) == (0, ())
        assert ledger.generated > 0
        assert min(ledger.accounts.values()) >= 0
        assert ledger.accounts[Account.IN_FLIGHT.value] == 0
        return self.report


@dataclass
class Bench:
    """Sessions that start their engines from the rig's warm process, in folders of their own."""

    rig: Any
    model: Path
    folder: Path
    states: dict[str, list[str]] = field(default_factory=dict)
    open_crew: OpenCrew = open_local_crew

    def play(
        self, sections: dict[str, dict[str, Any]], meanwhile: Callable[[Bench], Awaitable[None]] | None = None
    ) -> Played:
        self.runtime, output = self.folder / "rt", self.folder / "out"
        for each in (self.runtime, output):
            each.mkdir(exist_ok=True)
        run = Run("test-20260101-000000-0000", self.runtime, output, -1)
        books, waits = Books(), WaitBoard()
        self.board = StatusBoard(run, waits)
        job = a_job(self.model, self.folder, **sections)
        self.recorder = WatchingRecorder(job, run, books, waits, self.board, Metrics(), self._changed)
        session = Session(job, self.recorder, books, waits, self._open_launcher, self.open_crew)
        failure: RoseError | None = None
        with self.board:
            try:
                self.rig.run(self._both(session.run(), meanwhile))
            except RoseError as error:
                failure = error
        report = self.recorder.report("finished" if failure is None else "stopped", str(failure or ""))
        assert waits.snapshot() == ()
        assert self.engine_processes() == []
        seen: list[Trajectory] = getattr(self.recorder, "seen", [])
        return Played(report, failure, seen, list(self.recorder.parts()), self.states)

    async def _both(self, session: Awaitable[None], meanwhile: Callable[[Bench], Awaitable[None]] | None) -> None:
        fault = asyncio.create_task(meanwhile(self)) if meanwhile is not None else None
        try:
            await session
        finally:
            if fault is not None:
                fault.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await fault

    @contextlib.asynccontextmanager
    async def _open_launcher(self, waits: WaitBoard, log_path: Path, timeout_s: float) -> AsyncIterator[Any]:
        yield self.rig.warm

    def _changed(self, recorder: Recorder) -> None:
        for name, state, _ in recorder.parts():
            states = self.states.setdefault(name, [])
            if not states or states[-1] != state:
                states.append(state)

    async def incarnation(self, number: int) -> PageReader:
        """The page of the `number`th incarnation, once it has sampled in a rollout."""
        while True:
            pages = sorted(self.runtime.glob("*.page"), key=lambda path: path.stat().st_mtime_ns)
            if len(pages) >= number and self.recorder.phase == "rollout":
                page = PageReader(pages[number - 1])
                before = page.total()
                while page.total() < before + 200:
                    await asyncio.sleep(0.002)
                return page
            await asyncio.sleep(0.002)

    def engine_processes(self) -> list[int]:
        """Engine cores of this session that still run."""
        pids = [PageReader(path).pid for path in self.runtime.glob("*.page")]
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, because it holds unix sockets."""
    with tempfile.TemporaryDirectory(prefix="rose-") as name:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", str(Path(name) / "root"))
        yield Path(name)


@pytest.fixture
def bench(rig: Any, shipped_model: Path, folder: Path) -> Bench:
    return Bench(rig, shipped_model, folder)


@pytest.fixture
def babbling(rig: Any, babbling_model: Path, folder: Path) -> Bench:
    """The same, on a model whose turns are long enough to be broken off."""
    return Bench(rig, babbling_model, folder)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of that size at `path`; only root may make one."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_small_job_runs_to_its_end(bench: Bench) -> None:
    played = bench.play({})
    assert played.failure is None
    report = played.balanced()
    assert (report.outcome, report.versions_published, len(report.steps)) == ("finished", 3, 3)
    assert all(step.parity_max is not None and step.parity_max <= 1e-4 for step in report.steps)
    assert [each.version for each in report.evaluations] == [0, 3]
    assert report.engine_restarts == ()
    assert len(report.samples) == 8
    assert {"trainer", "engine-0"} <= {part[0] for part in played.parts}
    assert played.states["engine-0"] == ["starting", "ready", "ended"]
    # Later steps differ by the rounding to bf16; before the first there is none.
    assert (report.steps[0].logprob_mismatch_max or 0.0) < 1e-4


@pytest.mark.timeout(900)
def test_a_worker_of_the_environments_that_is_killed_costs_its_episodes_alone(bench: Bench) -> None:
    bench.open_crew = open_crew
    deadly = {"kind": "rough_lake:Deadly", "params": {"mark": str(bench.folder / "mark")}, "workers": 2}
    played = bench.play({"environment": deadly, "rollout": {"groups": 4}, "train": {"steps": 2}})
    assert played.failure is None, str(played.failure)
    report = played.balanced()
    assert report.outcome == "finished"
    outcomes = report.steps[0].outcomes
    assert sum(outcomes.values()) == 8
    assert 0 < outcomes["environment-failed"] <= 4  # those of one worker that had not ended yet
    assert report.steps[1].outcomes == {"completed": 8}
    (cause,) = report.environment_failures
    lost = cause.partition(" ")[0]
    assert cause.startswith(f"{lost} is dead: its process was killed")
    assert report.ledger.accounts[Account.ENVIRONMENT_FAILED.value] > 0
    assert played.states[lost] == ["starting", "ready", "dead", "starting", "ready", "ended"]
    for part in ("actor", "reference", "Ray"):
        assert played.states[part] == ["starting", "ready", "ended"]
    # The first step is sampled by the reference itself; what differs is the rounding.
    first, second = report.steps
    assert (first.reference_kl or 0.0) < 1e-6
    assert second.reference_kl is not None


@pytest.mark.parametrize("victim", ["api server", "engine core"])
def test_an_engine_killed_in_mid_rollout_is_restarted_and_its_turns_go_on(babbling: Bench, victim: str) -> None:
    async def kill(bench: Bench) -> None:
        page = await bench.incarnation(1)
        os.kill(os.getsid(page.pid) if victim == "api server" else page.pid, signal.SIGKILL)

    played = babbling.play(LONG_TURNS, kill)
    assert played.failure is None
    report = played.balanced()
    assert len(report.engine_restarts) == 1
    assert {each.outcome for each in played.trajectories} == {Outcome.COMPLETED}
    resumed = [turn for each in played.trajectories for turn in each.turns if len(turn.requests) > 1]
    assert resumed
    assert any(turn.requests[0].tokens > 0 for turn in resumed), "what had arrived was thrown away"
    for turn in resumed:
        first, second = turn.requests
        assert first.tokens + second.tokens == len(turn.output_ids)
        assert [span.version for span in turn.versions] == [0]
    assert played.states["engine-0"] == ["starting", "ready", "dead", "starting", "ready", "ended"]


def test_an_engine_that_hangs_is_ended_and_its_turns_go_on(babbling: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "COUNT_TIMEOUT_S", 1.0)

    async def hang(bench: Bench) -> None:
        os.kill((await bench.incarnation(1)).pid, signal.SIGSTOP)

    played = babbling.play({**LONG_TURNS, "rollout": {**LONG_TURNS["rollout"], "turn_timeout_s": 3.0}}, hang)
    assert played.failure is None
    report = played.balanced()
    (restart,) = report.engine_restarts
    assert "no final count" in restart.cause
    assert {each.outcome for each in played.trajectories} == {Outcome.COMPLETED}


def test_an_engine_that_dies_again_and_again_ends_the_run(babbling: Bench) -> None:
    async def kill_all(bench: Bench) -> None:
        for number in (1, 2):
            os.kill((await bench.incarnation(number)).pid, signal.SIGKILL)

    played = babbling.play({**LONG_TURNS, "engine": {"restarts_max": 1}}, kill_all)
    assert isinstance(played.failure, EngineError)
    assert "given up after 1 restart" in str(played.failure)
    report = played.balanced()
    assert len(report.engine_restarts) == 1
    assert report.ledger.accounts[Account.ABORTED.value] > 0


def test_environments_that_raise_hang_or_flood_cost_their_own_trajectories(bench: Bench) -> None:
    played = bench.play(
        {
            "environment": {"kind": "rough_lake:Unruly", "step_timeout_s": 0.5},
            "rollout": {"groups": 4},
            "train": {"steps": 1},
            "weights": {"parity_every_steps": 0},
        }
    )
    assert played.failure is None
    report = played.balanced()
    assert report.steps[0].outcomes == {"completed": 2, "environment-failed": 6}
    causes = " ".join(report.environment_failures)
    for words in ("the lake is dry", "no step after 0.5 s", "10000000 characters", "never begins"):
        assert words in causes
    assert report.ledger.accounts[Account.ENVIRONMENT_FAILED.value] > 0
    assert report.evaluations[0].success >= 0


def test_an_update_that_loses_the_action_format_raises_the_alarm(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = actor_rank.update

    def ruinous(policy: Any, *rest: Any) -> Any:
        stats = real(policy, *rest)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter))
        return stats

    monkeypatch.setattr(actor_rank, "update", ruinous)
    played = bench.play(
        {
            "rollout": {"groups": 4, "group_size": 4},
            "evaluation": {"episodes": 24},
            "weights": {"parity_every_steps": 0},
        }
    )
    assert isinstance(played.failure, TrainingError)
    report = played.balanced()
    (alarm,) = report.alarms
    assert alarm.version == 1
    assert "version 0 did" in alarm.what
    assert (report.outcome, len(report.steps)) == ("stopped", 1)
    assert report.ledger.accounts[Account.ABORTED.value] > 0


def fill_up(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


async def until_rollout(bench: Bench) -> None:
    while bench.recorder.phase != "rollout":
        await asyncio.sleep(0.002)


def test_a_full_disk_ends_the_run_with_what_is_free(bench: Bench) -> None:
    async def fill(bench: Bench) -> None:
        await until_rollout(bench)
        fill_up(bench.folder / "rt")

    with small_disk(bench.folder / "rt", "8m"):
        played = bench.play({"weights": {"parity_every_steps": 0, "keep": 1}}, fill)
    assert isinstance(played.failure, TransferError)
    assert re.search(r"no room for version \d+ in .*: \d+ bytes needed, \d+ free", str(played.failure))
    played.balanced()


@pytest.mark.parametrize("parity_every_steps", [0, 1])
def test_a_full_output_folder_does_not_end_the_training(bench: Bench, parity_every_steps: int) -> None:
    output = bench.folder / "out"

    async def fill(bench: Bench) -> None:
        await until_rollout(bench)
        fill_up(output)
        logger("test").info("x" * 5000)  # more than the last page of the log's own file still holds

    with small_disk(output, "1m"):
        with open_log(output / "log.jsonl") as log:
            sections = {"train": {"steps": 2}, "weights": {"parity_every_steps": parity_every_steps}}
            played = bench.play(sections, fill)
        assert log.lost_lines > 0
        with pytest.raises(ClusterError, match=r"report\.json could not be written"):
            write_report(played.report, output)
    assert played.failure is None, str(played.failure)
    assert len(played.balanced().steps) == 2


def test_a_scheduler_that_is_killed_in_mid_rollout_comes_back_and_the_run_goes_on(babbling: Bench) -> None:
    async def kill(bench: Bench) -> None:
        await bench.incarnation(1)
        (scheduler,) = schedulers()
        scheduler.kill()

    played = babbling.play(LONG_TURNS, kill)
    assert played.failure is None
    report = played.balanced()
    assert {each.outcome for each in played.trajectories} == {Outcome.COMPLETED}
    assert played.states["scheduler"] == ["starting", "ready", "starting", "ready", "ended"]
    assert report.engine_restarts == ()
    assert schedulers() == []


def schedulers() -> list[psutil.Process]:
    """Of sessions in this process; one that has ended is none."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "scheduler" in child.cmdline():
                found.append(child)
    return found


def test_a_lent_engine_takes_turns_and_costs_none_when_it_is_killed(babbling: Bench) -> None:
    authority = make_authority(babbling.folder / "authority")
    mine, theirs = (str(authority.signs(name)) for name in ("mine", "theirs"))

    async def lend_and_kill(bench: Bench) -> None:
        async with a_guest(bench.rig, bench.model, bench.folder / "guest", bench.runtime, theirs) as guest:
            while bench.recorder.phase != "rollout":
                await asyncio.sleep(0.002)
            await guest.sampled(200)
            guest.kill()

    sections = {**LONG_TURNS, "engine": {"max_num_seqs": 2}, "rollout": {"groups": 8, "max_new_tokens": 200}}
    sections["run"] = {"certificates": mine}
    played = babbling.play(sections, lend_and_kill)
    assert played.failure is None
    report = played.balanced()
    assert {each.outcome for each in played.trajectories} == {Outcome.COMPLETED}
    engines = {each.engine_id: each for each in report.engines}
    assert (engines["guest"].kind, engines["engine-0"].kind) == ("lent", "dedicated")
    assert engines["guest"].tokens_received > 0
    assert engines["guest"].lost_requests > 0
    moved = [turn for each in played.trajectories for turn in each.turns if len(turn.requests) > 1]
    assert any(turn.requests[0].engine_id == "guest" and turn.requests[0].tokens > 0 for turn in moved)
    assert played.states["guest"][-1] == "dead"
