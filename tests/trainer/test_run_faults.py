"""Runs as a user has them: interrupted, killed, refused; afterwards the machine is as it was before."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from stand_ins import a_job

import rose.demo.warmstart
from rose.errors import ClusterError, EngineError
from rose.report.model import RunReport
from rose.status import FILE_NAME, Page
from rose.trainer import run as module
from rose.trainer.recorder import Recorder
from rose.trainer.run import run_job

DEADLINE_S = 240.0


# The rules by which a run ends, without an engine.


class Ending:
    """Runs a job whose session does what a test says, in a process that keeps its own children."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, model: Path) -> None:
        self._patch, self.folder, self._model = monkeypatch, folder, model
        self.reports: list[RunReport] = []
        self.outputs: list[Path | None] = []
        monkeypatch.setenv("ROSE_RUNTIME_DIR", str(folder / "rt"))
        monkeypatch.setattr(module, "become_subreaper", lambda: None)
        monkeypatch.setattr(module, "end_descendants", lambda grace_s: 0)

    def run(self, body: Callable[[Recorder], Any]) -> None:
        class Session:
            def __init__(self, job: Any, recorder: Recorder, books: Any, waits: Any) -> None:
                self.recorder = recorder

            async def run(self) -> None:
                result = body(self.recorder)
                if result is not None:
                    await result

        self._patch.setattr(module, "Session", Session)
        run_job(a_job(self._model, self.folder / "out"), changed=lambda recorder: None, ended=self._ended)

    def _ended(self, report: RunReport, output: Path | None) -> None:
        self.reports.append(report)
        self.outputs.append(output)

    def whole(self) -> RunReport:
        """The one report, on disk as it was told; nothing else is left of the run."""
        (report,), (output,) = self.reports, self.outputs
        assert output is not None
        assert RunReport.from_json((output / "report.json").read_text()) == report
        assert self.left() == []
        return report

    def left(self) -> list[str]:
        return [path.name for path in (self.folder / "rt").iterdir() if path.name != ".lock"]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, short_folder: Path, shipped_model: Path) -> Ending:
    return Ending(monkeypatch, short_folder, shipped_model)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Short, because it holds unix sockets."""
    with tempfile.TemporaryDirectory(prefix="rose-") as name:
        yield Path(name)


def test_a_run_that_ends_well_says_so(ending: Ending) -> None:
    ending.run(lambda recorder: None)
    assert ending.whole().outcome == "finished"


@pytest.mark.parametrize(
    ("error", "cause"),
    [(EngineError("it died"), "engine: it died"), (ZeroDivisionError("a fault"), "ZeroDivisionError: a fault")],
)
def test_a_run_that_fails_is_reported_with_its_cause_whatever_it_is(
    ending: Ending, error: Exception, cause: str
) -> None:
    def body(recorder: Recorder) -> None:
        raise error

    with pytest.raises(type(error)):
        ending.run(body)
    report = ending.whole()
    assert (report.outcome, report.cause) == ("stopped", cause)
    log = (ending.outputs[0] / "log.jsonl").read_text()
    assert ("Traceback" in log) == isinstance(error, ZeroDivisionError)


def test_an_interrupted_run_is_reported_as_such_also_if_ending_it_failed(ending: Ending) -> None:
    async def waits_for_ever() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            raise EngineError("would not end")

    with pytest.raises(KeyboardInterrupt):
        ending.run(lambda recorder: waits_for_ever())
    assert ending.whole().cause == "interrupted"


def test_a_signal_after_the_last_step_changes_nothing(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.write_report

    def interrupted(report: RunReport, output: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(report, output)

    monkeypatch.setattr(module, "write_report", interrupted)
    ending.run(lambda recorder: None)
    assert ending.whole().outcome == "finished"


def full(report: RunReport, output: Path) -> None:
    raise ClusterError("report.json could not be written: No space left on device")


def test_a_report_that_cannot_be_written_is_named_and_shown_all_the_same(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_report", full)
    with pytest.raises(ClusterError, match="No space"):
        ending.run(lambda recorder: None)
    assert [report.outcome for report in ending.reports] == ["finished"]
    assert ending.left() == []


def test_a_report_that_cannot_be_written_does_not_hide_why_the_run_failed(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(recorder: Recorder) -> None:
        raise EngineError("it died")

    monkeypatch.setattr(module, "write_report", full)
    with pytest.raises(EngineError, match="it died"):
        ending.run(body)
    assert ending.outputs == [None]
    (log_file,) = (ending.folder / "out").glob("*/log.jsonl")
    assert "No space" in log_file.read_text()


def test_processes_that_survive_are_the_cause_of_a_run_that_had_none(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def survive(grace_s: float) -> int:
        raise ClusterError("processes [5] survive SIGKILL")

    monkeypatch.setattr(module, "end_descendants", survive)
    with pytest.raises(ClusterError, match="survive"):
        ending.run(lambda recorder: None)
    assert "survive" in ending.whole().cause


# Whole runs, as processes of their own.

QUICK = """
[run]
name = "quick"
metrics_port = {metrics_port}
[model]
path = "{model}"
[engine]
kv_cache_gib = {kv_cache_gib}
port = {port}
[environment]
kind = "{kind}"
[rollout]
groups = {groups}
max_new_tokens = {max_new_tokens}
[train]
steps = {steps}
threads = 1
[evaluation]
episodes = {episodes}
[weights]
parity_every_steps = 0
"""
DEFAULTS = {
    "groups": 2,
    "max_new_tokens": 6,
    "steps": 1,
    "episodes": 4,
    "kv_cache_gib": 0.0625,
    "metrics_port": 0,
    "port": 0,
    "kind": "frozen_lake",
}
MODEL = Path(rose.demo.warmstart.__file__).parent / "model"
# With a model that babbles, long enough to be interrupted in the middle on any machine.
LONG = {"groups": 16, "max_new_tokens": 200}


@dataclass
class Running:
    """One `rose run --plain`, with its words in a file."""

    process: subprocess.Popen[bytes]
    words: Path
    out: Path

    def until(self, line: str) -> None:
        """Wait until the run has said so."""
        deadline = time.monotonic() + DEADLINE_S
        while line not in self.said() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert line in self.said(), f"{line!r} was not said, but: {self.said()}"

    def said(self) -> str:
        return self.words.read_text()

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def status(self) -> int:
        return self.process.wait(DEADLINE_S)

    def report(self) -> RunReport:
        (path,) = self.out.glob("*/report.json")
        return RunReport.from_json(path.read_text())


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Machine:
    """Starts runs whose runtime and temporary files go to one folder, and looks for what they left there."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self._model = folder, model
        self.runtime, self.temporary = folder / "rt", folder / "tmp"
        self.temporary.mkdir()
        self._count = 0

    def start(
        self,
        program: Sequence[str] = (str(Path(sys.executable).with_name("rose")),),
        home: Path | None = None,
        **changes: Any,
    ) -> Running:
        self._count += 1
        job = self.folder / f"job{self._count}.toml"
        job.write_text(QUICK.format(**{"model": self._model, **DEFAULTS, **changes}))
        words, out = self.folder / f"words{self._count}", self.folder / f"out{self._count}"
        with words.open("wb") as file:
            process = subprocess.Popen(
                [*program, "run", str(job), "--plain", "--out", str(out)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "ROSE_RUNTIME_DIR": str(self.runtime),
                    "TMPDIR": str(self.temporary),
                    "PYTHONPATH": str(self.folder),
                    "PYTHONUNBUFFERED": "1",
                    **({} if home is None else {"HOME": str(home)}),
                },
            )
        return Running(process, words, out)

    def processes(self) -> list[psutil.Process]:
        """Whoever was started with this machine's runtime folder and still runs."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            ours = process.environ().get("ROSE_RUNTIME_DIR") == str(self.runtime)
            return ours and process.status() != psutil.STATUS_ZOMBIE
        return False

    def runs(self) -> list[Path]:
        """Runtime folders."""
        return sorted(path for path in self.runtime.iterdir() if path.name != ".lock")

    def litter(self) -> list[str]:
        """Temporary files, but for the cache that torch keeps for all processes of a user."""
        names = [path.name for path in self.temporary.iterdir()]
        return [name for name in names if not name.startswith("torchinductor_")]

    def is_clean(self) -> None:
        assert self.processes() == []
        assert self.runs() == []

    def end(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


@pytest.fixture
def machine(short_folder: Path, babbling_model: Path) -> Iterator[Machine]:
    made = Machine(short_folder, babbling_model)
    yield made
    made.end()


@pytest.mark.parametrize(
    ("moment", "changes", "signum"),
    [
        ("start of engine", {}, signal.SIGINT),
        ("rollout", LONG, signal.SIGTERM),
        ("train", {"model": MODEL, "groups": 32}, signal.SIGINT),
    ],
)
@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_a_run_that_is_stopped_leaves_nothing(
    machine: Machine, moment: str, changes: dict[str, Any], signum: signal.Signals
) -> None:
    run = machine.start(**changes)
    run.until(moment)
    run.signal(signum)
    assert run.status() == 130, run.said()
    machine.is_clean()
    report = run.report()
    assert (report.outcome, report.cause) == ("stopped", "interrupted")
    assert (report.ledger.gap, report.ledger.violations) == (0, ())
    assert "Traceback" not in run.said()
    assert machine.litter() == []


SLOW = """
import sys, threading, time
from rose.cli.main import main
from rose.trainer import session

def load(job):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    print("loading", flush=True)
    time.sleep(3600)

session._load_renderer = load
main()
"""


def test_a_run_that_is_stopped_does_not_wait_for_its_tokenizer_nor_for_foreign_threads(machine: Machine) -> None:
    (machine.folder / "slow.py").write_text(SLOW)
    run = machine.start((sys.executable, str(machine.folder / "slow.py")))
    run.until("loading")
    run.signal(signal.SIGINT)
    assert run.status() == 130, run.said()
    machine.is_clean()
    assert (run.report().outcome, run.report().cause) == ("stopped", "interrupted")
    assert "Traceback" not in run.said()
    assert "report.html" in run.said()
    assert machine.litter() == []


DEAF = """
import asyncio

def told():
    open("{folder}/told", "w").close()

class Deaf:
    system_prompt = ""

    async def reset(self, seed, episode_id):
        return "go"

    async def close(self): ...
"""
SPINS = """
    async def step(self, action):
        told()
        while True:
            pass
"""
IGNORES = """
    async def step(self, action):
        told()
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException:
                pass
"""


@pytest.mark.parametrize("step", [SPINS, IGNORES])
@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_an_environment_that_never_lets_go_does_not_make_a_run_deaf(machine: Machine, step: str) -> None:
    (machine.folder / "deaf.py").write_text(DEAF.format(folder=machine.folder) + step)
    run = machine.start(kind="deaf:Deaf")
    wait_for((machine.folder / "told").exists, "a step that does not answer")
    run.signal(signal.SIGTERM)
    assert run.status() == 130, run.said()
    machine.is_clean()
    report = run.report()
    assert (report.outcome, report.cause) == ("stopped", "interrupted")
    assert (report.ledger.gap, report.ledger.violations) == (0, ())
    assert report.ledger.generated > 0
    assert "Traceback" not in run.said()


@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_a_second_interrupt_ends_a_run_at_once(machine: Machine) -> None:
    run = machine.start(**{**LONG, "episodes": 128})
    run.until("evaluation")
    run.signal(signal.SIGINT)
    # The first is being worked on once the engine is asked to end; the second must not wait for that.
    time.sleep(0.05)
    run.signal(signal.SIGINT)
    assert run.status() == 130, run.said()
    machine.is_clean()


@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_runs_side_by_side_are_independent_and_a_killed_one_is_swept(machine: Machine) -> None:
    killed, other = machine.start(**LONG), machine.start()
    killed.until("rollout")
    killed.signal(signal.SIGKILL)
    assert killed.status() == -signal.SIGKILL
    assert other.status() == 0, other.said()
    report = other.report()
    assert (report.outcome, report.ledger.gap, len(report.steps)) == ("finished", 0, 1)
    wait_for(lambda: machine.processes() == [], "children of the killed run end with it")
    left = machine.runs()
    assert {path.name.partition("-")[0] for path in left} == {"quick", "scheduler"}
    third = machine.start()
    wait_for(lambda: not any(path.exists() for path in left), "the next run sweeps what the killed one left")
    third.until("start of engine")
    third.signal(signal.SIGINT)
    assert third.status() == 130, third.said()
    machine.is_clean()
    with taken_port() as port:
        fourth = machine.start(metrics_port=port)
        assert fourth.status() == 3
    assert f"metrics port: {port} is taken" in fourth.said()


@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_a_run_survives_the_loss_of_its_warm_process_once_and_ends_with_the_cause_the_second_time(
    machine: Machine,
) -> None:
    run = machine.start(**LONG)
    run.until("rollout")
    (first,) = warm_processes(run)
    first.kill()
    wait_for(lambda: "engine restarts" in run.said(), "another engine")
    (second,) = warm_processes(run)
    second.kill()
    assert run.status() == 1, run.said()
    machine.is_clean()
    report = run.report()
    assert "the warm process died" in report.cause
    assert len(report.engine_restarts) == 1
    assert (report.ledger.gap, report.ledger.violations) == (0, ())


@pytest.mark.parametrize(
    ("victim", "cause"), [("actor", "actor is dead"), ("raylet", "Ray is dead: raylet was killed")]
)
@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_a_run_that_loses_its_actor_or_ray_itself_ends_with_the_cause(
    machine: Machine, victim: str, cause: str
) -> None:
    run = machine.start(**{**LONG, "model": MODEL, "groups": 32})
    run.until("rollout")
    if victim == "actor":
        (folder,) = (path for path in machine.runs() if path.name.startswith("quick-"))
        page = Page.model_validate_json((folder / FILE_NAME).read_text())
        (detail,) = (part.detail for part in page.parts if part.name == "actor")
        psutil.Process(int(detail.removeprefix("process "))).kill()
    else:
        (process,) = (one for one in machine.processes() if one.name() == victim)
        process.kill()
    assert run.status() == 3, run.said()
    machine.is_clean()
    report = run.report()
    assert cause in report.cause
    assert (report.ledger.gap, report.ledger.violations) == (0, ())
    assert "Traceback" not in run.said()
    assert machine.litter() == []


def test_a_ray_that_does_not_start_ends_a_run_with_the_cause(machine: Machine) -> None:
    """Ray keeps its token in the user's home, which here is no folder."""
    (machine.folder / "file").touch()
    run = machine.start(home=machine.folder / "file")
    assert run.status() == 3, run.said()
    machine.is_clean()
    assert "Ray does not start" in run.report().cause
    assert machine.litter() == []


def warm_processes(run: Running) -> list[psutil.Process]:
    """The live ones; what they fork goes by the same command line, but is not the run's own child."""
    found = []
    for child in psutil.Process(run.process.pid).children():
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "rose_executor.warm_main" in child.cmdline():
                found.append(child)
    return found


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        yield holder.getsockname()[1]


def test_a_taken_port_is_named_with_status_3(machine: Machine) -> None:
    with taken_port() as port:
        run = machine.start(port=port)
        assert run.status() == 3
    assert f"{port} is taken" in run.said()
    machine.is_clean()


def test_more_memory_than_there_is_has_status_3(machine: Machine) -> None:
    run = machine.start(kv_cache_gib=1000.0)
    assert run.status() == 3
    assert "memory" in run.said()
    machine.is_clean()


def test_a_model_folder_that_is_none_has_status_2(short_folder: Path) -> None:
    (short_folder / "empty").mkdir()
    (short_folder / "empty" / "notes.json").write_text(json.dumps({}))
    machine = Machine(short_folder, short_folder / "empty")
    run = machine.start()
    assert run.status() == 2
    assert "model folder" in run.said()
