"""Which services stand together in `rose status`, and that one screen holds them."""

from __future__ import annotations

import io
from itertools import permutations
from pathlib import Path

from rich.console import Console

from rose.cli.status import render
from rose.cli.together import together
from rose.status import Fact, Liveness, OpenWait, Page, Part, RunStatus

NOW_S = 1_000.0
STAMP = "20261130-140000"


def service(
    run_id: str, out: str = "", *, waits: int = 0, liveness: Liveness = Liveness.LIVE, **facts: Fact
) -> RunStatus:
    page = Page(
        run_id=run_id,
        pid=7,
        output=out or f"/elsewhere/{run_id}",
        started_s=900.0,
        written_s=999.0,
        write_failures=0,
        parts=[Part(name=f"{part} of {run_id[:4]}", state="serving", detail="", since_s=990.0) for part in "abcd"],
        facts=dict(facts),
        waits=[
            OpenWait(what="answer", whom=f"engine-{number}", since_s=995.0, deadline_s=1_055.0)
            for number in range(waits)
        ],
    )
    return RunStatus(run_id, liveness, 1.0, page, "")


DIRECTOR = service(f"demo-{STAMP}-0001", run=f"lake-{STAMP}-0002", dashboard="http://127.0.0.1:9")
RUN = service(f"lake-{STAMP}-0002", "/out/lake", waits=2, scheduler="127.0.0.1:1", weights="127.0.0.1:2")
SCHEDULER = service(f"scheduler-{STAMP}-0003", "/out/lake/scheduler", waits=1, address="127.0.0.1:1")
EXECUTOR = service(f"executor-{STAMP}-0004", scheduler="127.0.0.1:1", weights="127.0.0.1:2")
DASHBOARD = service(f"board-{STAMP}-0005", address="http://127.0.0.1:9")
JOB = [DIRECTOR, RUN, SCHEDULER, EXECUTOR, DASHBOARD]
OTHER = service(f"lake-{STAMP}-0006", "/out/lake-too", scheduler="127.0.0.1:3")


def shown(*statuses: RunStatus) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(render(Path("/root"), list(statuses), NOW_S))
    return out.getvalue().splitlines()


def test_services_of_one_job_stand_together_in_whatever_order_they_are_found() -> None:
    for order in permutations(JOB):
        assert together([*order, OTHER]) == [list(order), [OTHER]]


def test_a_group_that_is_joined_late_stands_where_its_first_member_stood() -> None:
    assert together([EXECUTOR, OTHER, DASHBOARD, DIRECTOR, RUN]) == [[EXECUTOR, DASHBOARD, DIRECTOR, RUN], [OTHER]]


def test_an_output_folder_within_the_others_joins_and_one_beside_it_does_not() -> None:
    inner, outer = service("a", "/out/b/a"), service("b", "/out/b")
    assert together([inner, outer]) == [[inner, outer]]
    assert together([outer, inner]) == [[outer, inner]]
    assert len(together([service("a", "/out/a"), service("b", "/out/ab")])) == 2


def test_who_follows_the_same_weights_belongs_together() -> None:
    follower = service("follower", weights="127.0.0.1:2")
    assert together([RUN, follower, service("stranger", weights="127.0.0.1:4")])[0] == [RUN, follower]


def test_what_has_no_page_stands_alone() -> None:
    mute = RunStatus("mute", Liveness.STALE, None, None, "no status written yet")
    assert together([mute, RUN]) == [[mute], [RUN]]
    assert "mute  stale  no status written yet" in shown(mute)[0]


def test_a_whole_job_is_one_screen_with_one_table_of_parts_and_one_of_waits() -> None:
    lines = shown(*JOB)
    assert len(lines) <= 45
    words = [" ".join(line.split()) for line in lines]
    assert sum(line.startswith("part state") for line in words) == 1
    assert sum(line.startswith("waits for from") for line in words) == 1
    assert "lake a of lake serving 10.0 s" in words
    assert "b of lake serving 10.0 s" in words
    assert "lake answer engine-0 5.0 s in 55.0 s" in words
    assert "answer engine-1 5.0 s in 55.0 s" in words
    assert "scheduler answer engine-0 5.0 s in 55.0 s" in words
    assert all(any(status.run_id in line for line in lines) for status in JOB)


def test_the_dead_come_last_and_join_nobody() -> None:
    dead = service(EXECUTOR.run_id, liveness=Liveness.DEAD, scheduler="127.0.0.1:1")
    lines = shown(dead, RUN, SCHEDULER)
    heads = [line.split()[0] for line in lines if STAMP in line]
    assert heads == [RUN.run_id, SCHEDULER.run_id, dead.run_id]
    assert sum("when it last spoke" in line for line in lines) == 1
