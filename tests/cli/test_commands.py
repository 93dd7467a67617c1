from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rose.cli import run as run_module
from rose.cli.job_page import job_page
from rose.config import Job, load_job
from rose.errors import ClusterError, ConfigError, EngineError, RoseError
from rose.preflight import Check

PAGE = Path(__file__).parents[2] / "docs" / "job-file.md"


class Trainer(types.ModuleType):
    """Stands in for the real trainer: remembers what it was asked to run."""

    def __init__(self) -> None:
        super().__init__("rose.trainer.run")
        self.ran: list[tuple[Job, dict[str, Any]]] = []
        self.error: BaseException | None = None

    def run_job(self, job: Job, **options: Any) -> None:
        self.ran.append((job, options))
        if self.error:
            raise self.error


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    made = Trainer()
    monkeypatch.setitem(sys.modules, "rose.trainer.run", made)
    return made


@pytest.mark.parametrize("command", ["run", "demo", "status", "doctor", "job-file", "weights", "relay"])
def test_every_command_explains_itself(rose: Any, command: str) -> None:
    assert command in rose("--help").out
    ended = rose(command, "--help")
    assert ended.status == 0
    assert f"Usage: rose {command}" in ended.out


def test_help_gives_examples_and_bare_rose_gives_help(rose: Any) -> None:
    assert "rose run job.toml --dry-run" in rose("-h").out
    assert "Examples:" in rose("run", "-h").out
    assert "Usage: rose" in rose().out + rose().err


def test_version(rose: Any) -> None:
    assert rose("--version").out == "rose 0.1.0\n"


@pytest.mark.parametrize("args", [["rnu"], ["run"], ["run", "--nope"], ["status", "extra"]])
def test_a_wrong_command_line_ends_with_2(rose: Any, args: list[str]) -> None:
    ended = rose(*args)
    assert ended.status == 2
    assert "Usage: rose" in ended.err


def test_dry_run_prints_the_job_and_the_checks_and_runs_nothing(
    rose: Any, job_file: Path, trainer: Trainer, tmp_path: Path
) -> None:
    ended = rose("run", job_file, "--dry-run")
    assert ended.status == 0, ended.out
    text, _, table = ended.out.partition("\ncheck ")
    (tmp_path / "again.toml").write_text(text)
    assert load_job(tmp_path / "again.toml") == load_job(job_file)
    assert "memory" in table
    assert "FAILED" not in table
    assert trainer.ran == []
    assert not (tmp_path / "runs").exists()


def test_dry_run_ends_with_1_where_a_check_fails(rose: Any, job_file: Path) -> None:
    (job_file.parent / "model" / "tokenizer.json").unlink()
    ended = rose("run", job_file, "--dry-run")
    assert ended.status == 1
    assert "FAILED" in ended.out
    assert "to do: in model.path, name a folder" in ended.out


def test_an_unknown_environment_and_wrong_params_are_found_before_the_run(rose: Any, job_file: Path) -> None:
    job_file.write_text(job_file.read_text() + "[environment.params]\nsizes = 4\n")
    ended = rose("run", job_file)
    assert ended.status == 2
    assert "environment: " in ended.err
    assert "sizes" in ended.err


def test_run_gives_the_job_to_the_trainer(rose: Any, job_file: Path, trainer: Trainer, tmp_path: Path) -> None:
    assert rose("run", job_file, "--plain", "--out", "there").status == 0
    ((job, watchers),) = trainer.ran
    assert job == load_job(job_file, out=tmp_path / "there")
    assert set(watchers) == {"changed", "ended"}


@pytest.mark.parametrize(("of_job", "status"), [(True, 2), (False, 3)])
def test_a_failed_check_ends_the_run_before_it_begins(
    rose: Any, job_file: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, of_job: bool, status: int
) -> None:
    check = Check("memory", False, "1 GiB available", "6 GiB", "end other programs", of_job)
    monkeypatch.setattr(run_module, "preflight", lambda *_: [check])
    ended = rose("run", job_file)
    assert ended.status == status
    assert "memory: 1 GiB available; needed: 6 GiB; end other programs" in ended.err
    assert trainer.ran == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("wrong", expected="right", to_do="mend it"), 2),
        (ClusterError("wrong", expected="right", to_do="mend it"), 3),
        (EngineError("wrong", expected="right", to_do="mend it"), 1),
    ],
)
def test_an_error_is_three_lines_and_a_status(
    rose: Any, job_file: Path, trainer: Trainer, error: RoseError, status: int
) -> None:
    trainer.error = error
    ended = rose("run", job_file)
    assert ended.status == status
    assert ended.err.splitlines() == [f"{error.boundary}: wrong", "  expected: right", "  to do:    mend it"]


def test_what_is_not_known_is_left_out(rose: Any, job_file: Path, trainer: Trainer) -> None:
    trainer.error = EngineError("wrong")
    assert rose("run", job_file).err == "engine: wrong\n"


def test_a_fault_of_our_own_says_so_and_how_to_see_it(rose: Any, job_file: Path, trainer: Trainer) -> None:
    trainer.error = ZeroDivisionError("by zero")
    ended = rose("run", job_file)
    assert ended.status == 1
    assert ended.err.startswith("a fault of rose itself: ZeroDivisionError: by zero\n")
    assert "rose --debug" in ended.err


# A run that was interrupted while a thread of an environment's goes on, which nobody can end.
INTERRUPTED_RUN = """
import sys, threading, time, types
def run_job(*_, **__):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    raise KeyboardInterrupt
sys.modules["rose.trainer.run"] = types.SimpleNamespace(run_job=run_job)
from rose.cli.main import main
main()
"""


@pytest.mark.usefixtures("runtime_dir")
def test_an_interrupted_run_leaves_at_once_with_130_and_no_traceback(job_file: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_RUN, "run", str(job_file)]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 130
    assert b"Traceback" not in ended.stderr


# The module on which the command spends its first third of a second, interrupted instead.
INTERRUPTED_IMPORT = """
import signal, sys
class Interrupter:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
from rose.cli.main import main
main()
"""


def test_ctrl_c_while_it_begins_is_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"], ["job-file"], ["--help"]])
def test_an_output_on_a_full_disk_is_said_to_be_one(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        called = [sys.executable, "-m", "rose.cli.main", *command]
        ended = subprocess.run(called, stdout=full, stderr=subprocess.PIPE, text=True, timeout=20)
    assert ended.returncode == 3
    assert ended.stderr.startswith("cluster: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("error", [EngineError("wrong"), ZeroDivisionError("by zero")])
def test_debug_raises_for_the_traceback(
    job_file: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, error: Exception
) -> None:
    from rose.cli.main import main

    trainer.error = error
    monkeypatch.setattr(sys, "argv", ["rose", "--debug", "run", str(job_file)])
    with pytest.raises(type(error)):
        main()


def test_the_reference_page_is_up_to_date(rose: Any) -> None:
    assert rose("job-file").out == job_page()
    assert PAGE.read_text(encoding="utf-8") == job_page(), "run: ./dev rose job-file > docs/job-file.md"


def test_the_reference_page_names_every_key() -> None:
    rows = [line for line in job_page().splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(section.annotation.model_fields) for section in Job.model_fields.values())  # type: ignore[union-attr]
    assert all(len(row.split(" | ")) == 4 and "PydanticUndefined" not in row for row in rows)
