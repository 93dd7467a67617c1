"""The report's lines over time, from what an observer has seen."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from rose.demo.over_time import GUEST, POINTS_MAX, Watched, sharing_section
from rose.observer.measures import SeriesKey, Source
from rose.observer.observer import View
from rose.observer.services import Life, Service
from rose.status import Page, Part

DIRECTOR, RUN, FIRST, SECOND = "director-1", "run-1", "executor-1", "executor-2"


def watched() -> Watched:
    return Watched(
        pids={1: "director", 2: "run", 3: GUEST, 4: GUEST},
        services={"director": {DIRECTOR}, "run": {RUN}, GUEST: {FIRST, SECOND}},
    )


def key(service: str, figure: str, label: str = "", target: str = "") -> SeriesKey:
    return SeriesKey(Source(service, target), figure, label)


def page(pid: int, *parts: Part) -> Page:
    return Page(
        run_id="x", pid=pid, output="", started_s=0.0, written_s=0.0, write_failures=0, parts=list(parts), facts={},
        waits=[],
    )  # fmt: skip


def service(name: str, pid: int, *parts: Part) -> Service:
    return Service(name, Life.LIVE, page(pid, *parts), "", 0.0)


def test_services_are_told_apart_by_their_processes() -> None:
    one = Watched(pids={2: "run", 3: GUEST})
    part = Part(name="partition", state="cgroup v1", detail="costs nothing", since_s=0.0)
    services = {"a": service("a", 2), "b": service("b", 3, part), "c": service("c", 99)}
    one.seen(View(1.0, services, {}, {}))
    assert one.services == {"run": {"a"}, GUEST: {"b"}}
    assert one.partition == "cgroup v1: costs nothing"


def test_a_service_below_a_guard_is_known_by_its_session() -> None:
    leader = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    program = int(leader.stdout.readline())
    one = Watched(pids={leader.pid: "run"})
    one.seen(View(1.0, {"a": service("a", program), "b": service("b", os.getpid())}, {}, {}))
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    assert one.services == {"run": {"a"}}


def test_each_figure_becomes_a_line_of_whom_it_is_of_in_the_reports_units() -> None:
    one = watched()
    one.store.append(
        1010.0,
        {
            key(DIRECTOR, "ttft p95", target="load"): 0.05,
            key(FIRST, "compute", "guest"): 0.6,
            key(RUN, "engine tokens", target="engine-0"): 300.0,
            key(RUN, "version", "engine-0"): 3.0,
            key("another-run", "version", "engine-0"): 8.0,
        },
    )
    section = sharing_section(one, ["engine-0"], 1000.0)
    found = {(line.what, line.who): (line.at_s, line.values) for line in section.series}
    assert found == {
        ("ttft_p95_ms", "serving"): ((10.0,), (50.0,)),
        ("compute", "guest"): ((10.0,), (0.6,)),
        ("rollout_tokens_s", "engine-0"): ((10.0,), (300.0,)),
        ("weight_version", "engine-0"): ((10.0,), (3.0,)),
    }


def test_an_executor_that_was_started_again_is_one_line_and_its_counts_add_up() -> None:
    one = watched()
    counts = {"guest restarts": 1.0, "preemptions": 4.0, "starvations": 0.0, "fetched": 10.0}
    one.store.append(1.0, {key(FIRST, "gate"): 0.5, **{key(FIRST, name): value for name, value in counts.items()}})
    one.store.append(2.0, {})
    one.store.append(3.0, {key(SECOND, "gate"): 0.7, **{key(SECOND, name): value for name, value in counts.items()}})
    section = sharing_section(one, [], 0.0)
    (gate,) = [line for line in section.series if line.what == "gate_open"]
    assert (gate.at_s, gate.values) == ((1.0, 2.0, 3.0), (0.5, None, 0.7))
    assert (section.guest_restarts, section.preemptions, section.starvations, section.fetched_bytes) == (2, 8, 0, 20)


def test_a_long_line_is_thinned_to_real_points() -> None:
    one = watched()
    for tick in range(3 * POINTS_MAX):
        one.store.append(float(tick), {key(FIRST, "gate"): float(tick)})
    (gate,) = sharing_section(one, [], 0.0).series
    assert len(gate.at_s) == POINTS_MAX
    assert gate.at_s == gate.values


def test_what_the_board_said_comes_before_what_the_executor_tells() -> None:
    one = watched()
    one.board = [(90.0, 0.3), (92.0, 0.4), (111.0, 0.9)]
    one.store.append(110.0, {key(FIRST, "compute", "serving"): 0.35})
    (compute,) = sharing_section(one, [], 100.0).series
    assert compute.at_s == (-10.0, -8.0, 10.0)
    assert compute.values == pytest.approx((0.3, 0.4, 0.35))


def test_with_nothing_seen_there_is_nothing_to_show() -> None:
    section = sharing_section(Watched(), ["engine-0"], 0.0)
    assert section.series == ()
    assert "no executor" in section.partition
