"""A trajectory can be followed: what of it stands in the log, under its id."""

from __future__ import annotations

import asyncio
import sys

import pytest
from stand_ins import END, Answer, Logged, Lost, ScriptedSupervisor, a_sampler, in_turn

from rose.config import EnvironmentConfig
from rose.errors import EnvironmentFailed
from rose.records import Finish
from rose.trainer.books import Books
from rose.trainer.environment_rank import EnvironmentRank
from rose.trainer.sampler import SamplingSettings
from rose_scheduler.client import Turn


def test_each_part_of_a_turn_with_its_engine_lease_and_version(books: Books, logged: Logged) -> None:
    supervisor = ScriptedSupervisor(
        in_turn(Lost((5, 6), generated=4, version=3), Answer((7, END), version=4)), books.watch
    )
    sampler = a_sampler(supervisor, books, SamplingSettings(1.0, 6, (END,), 3, lease_wait_s=5.0, lease_hold_s=5.0))
    books.open_trajectory("s1g0-1")
    turn = asyncio.run(sampler.sample(Turn("s1g0-1", "s1g0", 2, 2), [10, 11]))
    assert turn.finish is Finish.STOP
    resumes, first, second = logged.of("s1g0-1")
    assert [one["event"] for one in (resumes, first, second)] == ["turn resumes", "turn sampled", "turn sampled"]
    assert (resumes["request_id"], resumes["kept_tokens"]) == ("s1g0-1.2.0", 2)
    told = [{key: one[key] for key in ("request_id", "tokens", "versions", "finish")} for one in (first, second)]
    assert told == [
        {"request_id": "s1g0-1.2.0", "tokens": 2, "versions": [3], "finish": "abort"},
        {"request_id": "s1g0-1.2.1", "tokens": 2, "versions": [4], "finish": "stop"},
    ]
    assert {first["engine_id"], second["engine_id"]} == {"engine-0"}


def rank(**params: int) -> EnvironmentRank:
    return EnvironmentRank(EnvironmentConfig(kind="frozen_lake", params=params), list(sys.path))


def test_an_episode_from_its_opening_to_its_close(logged: Logged) -> None:
    async def play() -> None:
        environments = rank()
        await environments.open(0, 7, "s1g0-1")
        await environments.step(0, "no action")
        await environments.step(0, "no action")
        await environments.close(0)
        await environments.end()

    asyncio.run(play())
    opens, closes = logged.of("s1g0-1")
    assert (opens["event"], opens["seed"]) == ("episode opens", 7)
    assert (closes["event"], closes["steps"]) == ("episode closes", 2)
    assert closes["step_s"] >= 0


def test_an_episode_that_fails_says_why_under_its_id(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: object) -> None:
        raise OSError("no lake")

    async def play(method: str, episode_id: str) -> None:
        environments = rank()
        if method == "step":
            await environments.open(0, 7, episode_id)
        monkeypatch.setattr(f"rose.env.frozen_lake.FrozenLake.{method}", breaks)
        with pytest.raises(EnvironmentFailed):
            await (environments.step(0, "x") if method == "step" else environments.open(0, 7, episode_id))
        await environments.end()

    asyncio.run(play("step", "s1g0-1"))
    assert logged.events("s1g0-1") == ["episode opens", "episode fails", "episode closes"]
    assert "no lake" in logged.of("s1g0-1")[1]["why"]
    asyncio.run(play("reset", "s1g0-2"))
    assert logged.events("s1g0-2") == ["episode opens", "episode fails"]
