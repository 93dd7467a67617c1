"""Who used which core: whose process is whose, and what falls into which span."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bench.coserve_demo import cores_of
from bench.cpu_watch import CpuWatch, Process, Reading, parts, used

LONG_S = 60.0
PYTHON = "python -P -m rose_executor.child_main 7"


def running(*commands: tuple[int, int, str]) -> list[Process]:
    return [Process(pid, parent, 0, 1.0, command) for pid, parent, command in commands]


def test_every_process_has_its_part() -> None:
    tree = running(
        (1, 0, "bench"),
        (2, 1, "python -m rose.cli.main demo"),
        (3, 2, f"{PYTHON} rose_executor.engine_main --model m"),
        (4, 3, "VLLM::EngineCore"),
        (5, 2, f"{PYTHON} rose.cli.main executor --config c"),
        (6, 5, "python -m rose_executor.warm_main 5"),
        (7, 6, "VLLM::EngineCore"),
        (8, 2, f"{PYTHON} rose.cli.main run job.toml"),
        (9, 8, "python -m rose_executor.warm_main 8"),
        (10, 9, "VLLM::EngineCore"),
        (11, 8, f"{PYTHON} rose.cli.main scheduler --port 0"),
        (12, 8, "python -m rose.trainer.cluster_main /tmp/x"),
        (13, 12, "/lib/ray/core/src/ray/raylet/raylet"),
        (14, 13, "ray::_Host.call"),
        (15, 13, "ray::_AsyncHost"),
        (16, 13, "ray::DashboardAgent"),
        (17, 2, f"{PYTHON} rose.workload.load_main --url u"),
        (18, 2, f"{PYTHON} rose.cli.main dashboard"),
        (19, 0, "somebody else"),
    )
    assert {process.pid: part for process, part in parts(tree, 1)} == {
        2: "director",
        3: "serving engine",
        4: "serving engine",
        5: "executor",
        6: "guest engine",
        7: "guest engine",
        8: "run",
        9: "dedicated engine",
        10: "dedicated engine",
        11: "scheduler",
        12: "Ray itself",
        13: "Ray itself",
        14: "actor and reference",
        15: "environments",
        16: "Ray itself",
        17: "load client",
        18: "dashboard",
    }


def test_what_a_process_uses_counts_for_the_part_that_it_plays_by_then() -> None:
    watch, me = CpuWatch(), os.getpid()
    bench = Process(me, 0, 0, 0.0, "bench")
    watch._read([bench, Process(2, me, 0, 1.0, "ray::IDLE")], 1.0)
    watch._read([bench, Process(2, me, 0, 1.5, "ray::_Host")], 2.0)
    watch._read([bench], 3.0)
    watch._read([bench, Process(2, me, 9, 0.25, "ray::_Host")], 4.0)
    assert watch.readings[-1].used_s == {"Ray itself": 1.0, "actor and reference": 0.75}


def test_what_was_used_counts_as_far_as_a_span_covers_it() -> None:
    readings = [Reading(10.0, {"run": 1.0}), Reading(11.0, {"run": 2.0}), Reading(13.0, {"run": 2.5, "guest": 2.0})]
    assert used(readings, [(10.0, 11.0)]) == {"run": 1.0}
    assert used(readings, [(10.5, 12.0)]) == pytest.approx({"run": (0.5 + 0.25) / 1.5, "guest": 1.0 / 1.5})
    assert used(readings, [(10.0, 11.0), (12.0, 99.0)]) == pytest.approx({"run": 1.25 / 2, "guest": 1.0 / 2})
    assert used(readings, [(14.0, 15.0)]) == used([], [(0.0, 1.0)]) == {}


def test_a_process_below_is_seen_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cpu_watch.EVERY_S", 0.02)
    burn = "import time\nwhile time.process_time() < 0.6: pass\ntime.sleep(600)"
    with (
        CpuWatch() as watch,
        subprocess.Popen([sys.executable, "-c", burn, "rose.workload.load_main"]) as child,
    ):
        try:
            until_s = time.monotonic() + LONG_S
            while not watch.readings or watch.readings[-1].used_s.get("load client", 0.0) < 0.3:
                assert time.monotonic() < until_s
                time.sleep(0.02)
        finally:
            child.kill()


def test_cores_become_figures() -> None:
    assert cores_of("with", {"load client": 0.5}) == {"cores_with_load_client": 0.5}
