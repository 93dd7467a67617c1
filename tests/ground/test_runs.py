from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rose import runs
from rose.config import Job, load_job
from rose.errors import ClusterError, DeadlineExceeded
from rose.runs import Run, list_runs, open_run, open_service, runtime_root, sweep
from rose.waits import WaitBoard

DEAD_ID = "demo-20250101-000000-abcd"


def test_a_run_has_two_folders_and_leaves_one(job: Job, runtime_dir: Path, waits: WaitBoard) -> None:
    with open_run(job, waits) as run:
        assert run.runtime.parent == runtime_dir
        assert run.output.parent == job.run.out
        assert load_job(run.output / "job.toml") == job
        assert [(found.run_id, found.alive) for found in list_runs(runtime_dir)] == [(run.run_id, True)]
    assert not run.runtime.exists()
    assert (run.output / "job.toml").exists()
    run.close()


def test_a_program_without_a_job_has_its_folders_too(tmp_path: Path, runtime_dir: Path, waits: WaitBoard) -> None:
    with open_service("scheduler", tmp_path / "out", waits, {"note.txt": "why"}) as run:
        assert run.run_id.startswith("scheduler-")
        assert [found.run_id for found in list_runs(runtime_dir)] == [run.run_id]
        assert run.output.parent == tmp_path / "out"
        assert [(file.name, file.read_text()) for file in run.output.iterdir()] == [("note.txt", "why")]
    assert list_runs(runtime_dir) == []


def test_ids_are_sortable_and_hold_the_name(job: Job, runtime_dir: Path, waits: WaitBoard) -> None:
    with open_run(job, waits) as first, open_run(job, waits) as second:
        assert first.run_id != second.run_id
        assert first.run_id.startswith("demo-")
        assert first.run_id[:20] <= second.run_id[:20]


def test_two_runs_at_once_do_not_sweep_each_other(job: Job, runtime_dir: Path, waits: WaitBoard) -> None:
    with open_run(job, waits) as first, open_run(job, waits) as second:
        assert sweep(waits) == []
        assert first.runtime.exists()
        assert second.runtime.exists()


def test_a_killed_run_is_dead_and_swept_by_the_next(
    job: Job, job_file: Path, runtime_dir: Path, waits: WaitBoard
) -> None:
    script = (
        "import sys, time; from pathlib import Path; from rose.config import load_job; from rose.runs import open_run\n"
        "from rose.waits import WaitBoard; run = open_run(load_job(Path(sys.argv[1])), WaitBoard())\n"
        "print(run.run_id, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(job_file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    run_id = child.stdout.readline().strip()
    assert list_runs(runtime_dir)[0].alive
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert [(found.run_id, found.alive) for found in list_runs(runtime_dir)] == [(run_id, False)]
    with open_run(job, waits) as run:
        assert [found.run_id for found in list_runs(runtime_dir)] == [run.run_id]
    assert (job.run.out / run_id / "job.toml").exists()


def test_many_that_open_and_sweep_at_once_lose_no_live_run(job: Job, runtime_dir: Path) -> None:
    def work() -> list[Run]:
        waits = WaitBoard()
        opened = []
        for _ in range(5):
            opened.append(open_run(job, waits))
            sweep(waits)
            list_runs(runtime_dir)
        return opened

    with ThreadPoolExecutor(6) as pool:
        opened = [run for done in [pool.submit(work) for _ in range(6)] for run in done.result()]
    assert len(opened) == 30
    assert all((run.runtime / "lock").exists() for run in opened)
    for run in opened:
        run.close()
    assert list_runs(runtime_dir) == []


def test_runs_of_the_same_second_that_draw_the_same_number_are_two(
    job: Job, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("rose.runs.secrets.token_hex", lambda length: next(drawn))
    monkeypatch.setattr("rose.runs.time.strftime", lambda *format: "20250101-000000")
    first, second = open_run(job, waits), open_run(job, waits)
    assert (first.run_id[-4:], second.run_id[-4:]) == ("aaaa", "bbbb")
    first.close()
    second.close()


def test_sweep_takes_half_made_folders_but_nothing_of_others(runtime_dir: Path, waits: WaitBoard) -> None:
    root = runtime_root()
    (root / DEAD_ID).mkdir()
    (root / "mine").mkdir()
    (root / "demo-2025").write_text("a file")
    target = root / "mine"
    (root / "demo-20250101-000000-ffff").symlink_to(target)
    assert sweep(waits) == [DEAD_ID]
    assert {path.name for path in root.iterdir()} == {"mine", "demo-2025", "demo-20250101-000000-ffff", ".lock"}


def fail_once(monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    """Make one step of `open_run` fail as a full or read-only disk would."""

    def failing(owner: object, name: str, matches: str) -> None:
        real = getattr(owner, name)

        def wrapped(path: Path, *args: object, **kwargs: object) -> object:
            if matches in str(path):
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    owner, name, matches = {
        "make the output folder": (Path, "mkdir", "runs/demo-"),
        "write job.toml": (Path, "write_text", "job.toml"),
        "make the runtime folder": (Path, "mkdir", "rt/demo-"),
        "make the lock": (os, "open", "/lock"),
    }[step]
    failing(owner, name, matches)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize(
    "step", ["make the output folder", "write job.toml", "make the runtime folder", "make the lock"]
)
def test_a_full_or_read_only_disk_leaves_nothing_half_made(
    job: Job, runtime_dir: Path, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    runtime_root()
    fail_once(monkeypatch, step, code)
    with pytest.raises(ClusterError, match=r"MiB free") as caught:
        open_run(job, waits)
    assert os.strerror(code) in caught.value.what
    assert list(job.run.out.glob("*")) == []
    assert [path.name for path in runtime_dir.iterdir()] == [".lock"]
    monkeypatch.undo()
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(runtime_dir))
    open_run(job, waits).close()


def test_an_out_that_is_a_file_is_told(job: Job, runtime_dir: Path, waits: WaitBoard) -> None:
    job.run.out.write_text("not a folder")
    with pytest.raises(ClusterError, match="runs/demo-"):
        open_run(job, waits)


def test_waiting_for_the_roots_lock_has_a_deadline_and_a_name(
    job: Job, runtime_dir: Path, waits: WaitBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ROOT_LOCK_TIMEOUT_S", 0.05)
    seen = []
    monkeypatch.setattr(runs.time, "sleep", lambda _s: seen.append(waits.snapshot()))
    fd = os.open(runtime_root() / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(DeadlineExceeded, match="another rose process"):
        open_run(job, waits)
    os.close(fd)
    assert seen[0][0].what.startswith("lock of")
    assert waits.snapshot() == ()
    assert list(job.run.out.glob("*")) == []


def test_a_socket_path_fits_or_is_refused(
    job: Job, runtime_dir: Path, waits: WaitBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(job, waits) as run:
        assert run.socket_path("engine-0.sock") == run.runtime / "engine-0.sock"
        with pytest.raises(ClusterError, match="too long"):
            run.socket_path("x" * 100)
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / ("y" * 80)))
    with pytest.raises(ClusterError, match="too long") as caught:
        open_run(job, waits)
    assert "ROSE_RUNTIME_DIR" in caught.value.to_do


def test_the_root_is_chosen_by_what_the_system_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_root() == tmp_path / "rose"
    assert (tmp_path / "rose").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert runs._root_path() == Path(f"/dev/shm/rose-{os.getuid()}")
    monkeypatch.setattr(runs.os, "access", lambda *_: False)
    monkeypatch.setattr(runs.tempfile, "gettempdir", lambda: str(tmp_path))
    assert runtime_root() == tmp_path / f"rose-{os.getuid()}"


def test_a_root_that_others_may_use_is_refused_and_left_alone(runtime_dir: Path) -> None:
    runtime_dir.mkdir(mode=0o755)
    with pytest.raises(ClusterError, match="mode 0755") as caught:
        runtime_root()
    assert "chmod 700" in caught.value.to_do
    assert runtime_dir.stat().st_mode & 0o777 == 0o755


def test_a_root_of_another_user_is_refused(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_root()
    monkeypatch.setattr(runs.os, "getuid", lambda: 4_000_000)
    with pytest.raises(ClusterError, match="owner"):
        runtime_root()


def test_a_link_in_place_of_the_default_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "rose").symlink_to(tmp_path / "target")
    with pytest.raises(ClusterError, match="not a folder"):
        runtime_root()


def test_no_runs_where_there_is_no_root(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
