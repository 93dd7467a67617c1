"""The demo as its user has it, in small: every process in turn is killed, or asked to end; nothing is ever left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose.demo.serving_model import warm_start
from rose.report.model import RunReport
from rose.runs import list_runs
from rose.status import Page, read_status

T = TypeVar("T")
DEADLINE_S = 400.0
END_S = 150.0
GIB = 1 << 30

JOB = """
[run]
name = "small"
[model]
path = "{model}"
[engine]
kv_cache_gib = 0.125
max_num_seqs = 16
[environment]
kind = "frozen_lake"
[rollout]
groups = 2
group_size = 4
[train]
steps = {steps}
threads = 1
[evaluation]
episodes = 2
[weights]
parity_every_steps = 0
"""


class SmallDemo:
    """One demo as a process, with a runtime root of its own, so that all that is in there is of it."""

    def __init__(self, folder: Path, *flags: str, steps: int = 500, memory_bytes: int = 0, path: str = "") -> None:
        self.root, self.out = folder / "rt", folder / "out"
        job = folder / "job.toml"
        job.write_text(JOB.format(model=warm_start(), steps=steps))
        self._said = (folder / "said").open("w+")
        main = Path(__file__).with_name("small_demo_main.py")

        def limit() -> None:
            if memory_bytes:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

        self.process = subprocess.Popen(
            [sys.executable, str(main), str(job), str(self.out), *flags],
            env={**os.environ, "ROSE_RUNTIME_DIR": str(self.root), "PYTHONPATH": path},
            stdout=self._said,
            stderr=self._said,
            preexec_fn=limit,
            start_new_session=True,
        )
        self._me = psutil.Process(self.process.pid)
        self.all: set[psutil.Process] = {self._me}

    def said(self) -> str:
        self._said.flush()
        return Path(self._said.name).read_text()

    def pages(self) -> dict[str, Page]:
        """By the first part of their ids."""
        self._remember()
        found = [read_status(run, time.time()).page for run in list_runs(self.root) if run.alive]
        return {page.run_id.rsplit("-", 3)[0]: page for page in found if page is not None}

    def until(self, what: str, look: Callable[[], T]) -> T:
        """What `look` finds, as soon as it finds something."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (found := look()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.said()}"
            assert time.monotonic() < deadline_s, f"no {what}:\n{self.said()}\n{self.pages()}"
            time.sleep(0.5)
        return found

    def trained(self, steps: int) -> int:
        """Waits until so many steps are done; which one is."""

        def steps_done() -> int:
            step = self.pages()["small"].facts.get("step") if "small" in self.pages() else None
            return step if isinstance(step, int) and step >= steps else 0

        return self.until(f"step {steps}", steps_done)

    def process_of(self, module: str) -> psutil.Process:
        """The director's own child that runs it; the newest, if there were several."""
        found = [child for child in self._me.children() if module in _command(child)]
        assert found, module
        return max(found, key=lambda child: child.create_time())

    def ended(self) -> int:
        """Its exit status; asserts that it has left nothing behind."""
        status = self.process.wait(timeout=END_S)
        _, left = psutil.wait_procs(self.all, timeout=60)
        assert left == []
        return status

    def reports(self) -> list[RunReport]:
        return [RunReport.from_json(path.read_text()) for path in self.out.glob("small-*/report.json")]

    def _remember(self) -> None:
        try:
            self.all.update(self._me.children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def close(self) -> None:
        self._remember()
        for one in self.all:
            if one.is_running():
                one.kill()
        psutil.wait_procs(self.all, timeout=30)
        self._said.close()


@contextmanager
def small_demo(*flags: str, steps: int = 500, memory_bytes: int = 0, path: str = "") -> Iterator[SmallDemo]:
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:  # short, because it holds unix sockets
        demo = SmallDemo(Path(folder), *flags, steps=steps, memory_bytes=memory_bytes, path=path)
        try:
            yield demo
        finally:
            demo.close()


def scraped(url: str) -> int:
    """How many samples; raises if it does not parse."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(len(family.samples) for family in families)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_survives_whom_it_can_spare_and_ends_cleanly_when_interrupted() -> None:
    with small_demo() as demo:
        demo.trained(1)
        pages = demo.until("all services", lambda: p if len(p := demo.pages()) >= 5 else None)
        assert set(pages) == {"director", "small", "scheduler", "executor", "dashboard"}
        director = pages["director"]
        assert {part.name for part in director.parts} >= {"serving", "load", "run", "executor"}
        assert director.facts["run"] == pages["small"].run_id
        urls = {str(url) for page in pages.values() for name, url in page.facts.items() if name.startswith("metrics")}
        assert len(urls) >= 6
        for url in urls - {str(director.facts["metrics load"])}:  # whose client may just have ended
            assert scraped(url) > 0

        for module in ("rose.workload.load_main", "executor --config", "rose.cli.main dashboard"):
            before = demo.process_of(module)
            before.kill()
            demo.until(f"another {module}", lambda m=module, pid=before.pid: _other(demo, m, pid))
        demo.until("the dashboard where it was", lambda: answers(str(director.facts["dashboard"])))
        demo.trained(demo.trained(1) + 2)

        demo.process.send_signal(signal.SIGINT)
        assert demo.ended() == 130
        (report,) = demo.reports()
        assert (report.outcome, report.cause) == ("stopped", "interrupted")
        assert report.ledger.gap == 0
        assert [path for path in demo.root.iterdir() if path.name != ".lock"] == []


def _command(process: psutil.Process) -> str:
    """ "" of one that has ended and that nobody has asked about yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return ""


def _other(demo: SmallDemo, module: str, pid: int) -> bool:
    try:
        return demo.process_of(module).pid != pid
    except (AssertionError, psutil.NoSuchProcess):
        return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_its_serving_engine_it_ends_with_the_cause() -> None:
    with small_demo() as demo:
        demo.trained(1)
        demo.process_of("rose_executor.engine_main").kill()
        assert demo.ended() == 1
        assert "the serving engine was killed by SIGKILL" in demo.said()
        (report,) = demo.reports()
        assert report.cause == "interrupted"
        assert report.ledger.gap == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_its_run_it_ends() -> None:
    with small_demo() as demo:
        demo.trained(1)
        demo.process_of("rose.cli.main run").kill()
        assert demo.ended() != 0
        (output,) = demo.out.glob("small-*")
        assert f"the run was killed by SIGKILL, and left no report; its log: {output}/log.jsonl" in demo.said()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_outlives_its_director() -> None:
    with small_demo() as demo:
        demo.trained(1)
        demo.process.kill()
        assert demo.ended() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_signal_ends_it_at_once() -> None:
    with small_demo() as demo:
        demo.trained(1)
        demo.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        demo.process.send_signal(signal.SIGINT)
        assert demo.ended() == 130


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whole_it_reports_what_serving_bore() -> None:
    with small_demo(steps=6) as demo:
        demo.pages()
        assert demo.process.wait(timeout=900) == 0
        (report,) = demo.reports()
        assert report.outcome == "finished"
        assert report.serving is not None
        assert report.serving.alone.requests > 0
        assert report.serving.shared.requests > 0
        assert report.sharing is not None
        assert {series.what for series in report.sharing.series} >= {"compute", "ttft_p95_ms"}
        assert report.ledger.gap == 0
        firsts = [line.split()[0] for line in demo.said().splitlines() if line.strip()]
        assert firsts.count("lent") <= 1
        assert firsts[-2:] == ["serving", "whole"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_ray_that_cannot_be_had_ends_it_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')\n")
    with small_demo(path=str(tmp_path)) as demo:
        demo.pages()
        assert demo.process.wait(timeout=900) == 3
        assert "no ray here" in demo.said()
        assert demo.ended() == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_too_little_memory_ends_it_with_the_cause() -> None:
    with small_demo(memory_bytes=GIB) as demo:
        demo.pages()
        assert demo.process.wait(timeout=900) == 1, demo.said()
        # By itself, or by an allocator that gives up: it depends on who needs the next page.
        assert re.search(r"the serving engine (ended|was killed by)", demo.said())
        assert demo.ended() == 1
