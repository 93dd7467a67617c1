"""Episodes in worker processes: the same words as beside the run, and a process's death is its episodes' alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_site import RaySite
from stand_ins import a_job

from rose.env.contract import StepResult
from rose.errors import ConfigError, EnvironmentFailed
from rose.trainer import environment_worker, line
from rose.trainer.remote_episodes import RemoteEpisodes, open_environments

pytestmark = pytest.mark.timeout(240)


class Workers:
    """Opens the workers of a job whose environment notes its closes."""

    def __init__(self, site: RaySite, folder: Path, model: Path) -> None:
        self.site = site
        self.notes = folder / "notes"
        self.notes.touch()
        self.said: list[tuple[str, str, str]] = []
        self._folder, self._model = folder, model

    @contextlib.asynccontextmanager
    async def opened(self, **environment: Any) -> AsyncIterator[RemoteEpisodes]:
        settings = {"kind": "rough_lake:Told", "params": {"notes": str(self.notes)}, **environment}
        job = a_job(self._model, self._folder, environment=settings)
        told = lambda *said: self.said.append(said)  # noqa: E731
        async with open_environments(self.site.ray, job, self.site.waits, logs=self.site.logs, told=told) as episodes:
            yield episodes

    def closed(self) -> list[str]:
        return self.notes.read_text().split()

    async def until_closed(self, names: set[str]) -> None:
        deadline = time.monotonic() + 60.0
        while set(self.closed()) != names:
            assert time.monotonic() < deadline, self.closed()
            await asyncio.sleep(0.01)


@pytest.fixture
def workers(ray_site: RaySite, tmp_path: Path, shipped_model: Path) -> Workers:
    return Workers(ray_site, tmp_path, shipped_model)


def process_of(said: str) -> int:
    return int(said.rsplit(maxsplit=1)[-1])


def test_an_episode_is_played_elsewhere_and_comes_back_as_plain_data(workers: Workers) -> None:
    async def play() -> None:
        async with workers.opened() as episodes:
            one = await episodes.open(5, "e1")
            assert process_of(one.first_observation) != os.getpid()
            assert type(one.first_observation) is type(one.system_prompt) is str
            assert one.system_prompt == "do"
            assert await one.step("on") == StepResult("on", 0.5, False, False)
            assert (await one.step("end")).over
            await workers.until_closed({"e1"})  # an episode that is over is closed without being told
            with pytest.raises(EnvironmentFailed, match="environment e1: stepped after it was closed"):
                await one.step("on")
            await one.close()
            left = await episodes.open(6, "e2")
            await left.close()
            await left.close()
            await workers.until_closed({"e1", "e2"})
            await episodes.open(7, "e3")
        assert workers.closed() == ["e1", "e2", "e3"]  # what is open at the end is closed then

    workers.site.run(play())
    assert [(name, state) for name, state, _ in workers.said] == [
        ("environment-0", state) for state in ("starting", "ready", "ended")
    ]


def test_failures_have_the_words_of_the_environments_host(workers: Workers) -> None:
    async def play() -> None:
        async with workers.opened(step_timeout_s=0.5) as episodes:
            with pytest.raises(EnvironmentFailed, match="environment e13: its reset raised RuntimeError: bad luck"):
                await episodes.open(13, "e13")
            one, other = await episodes.open(1, "e1"), await episodes.open(2, "e2")
            with pytest.raises(EnvironmentFailed, match="environment e1: its step raised ZeroDivisionError: by what"):
                await one.step("raise")
            stepping = asyncio.ensure_future(other.step("hang"))
            await asyncio.sleep(0.1)
            waits = {(wait.what, wait.whom) for wait in workers.site.waits.snapshot()}
            assert waits == {("step", "environment e2"), ("answers", "environment-0")}
            with pytest.raises(EnvironmentFailed, match=r"environment e2: no step after 0.5 s"):
                await stepping
            third = await episodes.open(3, "e3")
            assert (await third.step("on")).observation == "on"
            for each in (one, other, third):
                await each.close()
            await workers.until_closed({"e13", "e1", "e2", "e3"})

    workers.site.run(play())


def test_episodes_go_to_the_worker_that_has_the_fewest(workers: Workers) -> None:
    async def play() -> None:
        async with workers.opened(workers=2) as episodes:
            opened = [await episodes.open(seed, f"e{seed}") for seed in range(4)]
            pids = [process_of(each.first_observation) for each in opened]
            assert pids[0] != pids[1]
            assert pids[:2] == pids[2:]
            await opened[1].close()
            assert process_of((await episodes.open(9, "e9")).first_observation) == pids[1]

    workers.site.run(play())


@pytest.mark.parametrize("death", ["by itself", "killed", "stopped"])
def test_a_worker_that_is_lost_costs_its_episodes_and_is_replaced(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    ends: dict[str, Callable[[psutil.Process], object]] = {
        "by itself": lambda process: None,
        "killed": psutil.Process.kill,
        "stopped": psutil.Process.suspend,
    }
    if death == "stopped":
        monkeypatch.setattr(environment_worker, "PATIENCE_S", 0.5)
        monkeypatch.setattr(line, "HOLD_S", 0.5)

    async def play() -> None:
        async with workers.opened() as episodes:
            one, other = await episodes.open(1, "e1"), await episodes.open(2, "e2")
            pid = process_of(one.first_observation)
            ends[death](psutil.Process(pid))
            words = "environment-0: no answers after 1 s" if death == "stopped" else "environment-0 is dead"
            with pytest.raises(EnvironmentFailed, match=f"environment e1: {words}"):
                await one.step("die" if death == "by itself" else "on")
            why = "it was ended" if death == "stopped" else "its process was killed"
            with pytest.raises(EnvironmentFailed, match=f"environment e2: environment-0 is dead: {why}"):
                await other.step("on")
            await one.close()
            await other.close()
            monkeypatch.undo()
            again = await asyncio.gather(*(episodes.open(seed, f"e{seed}") for seed in (3, 4)))
            assert len({process_of(each.first_observation) for each in again} - {pid}) == 1
            assert (await again[0].step("on")).observation == "on"

    workers.site.run(play())
    states = [state for _, state, _ in workers.said]
    assert states == ["starting", "ready", "dead", "starting", "ready", "ended"]
    assert "after 1 that were lost" in workers.said[4][2]


def test_a_worker_that_dies_while_it_plays_nothing_is_replaced(workers: Workers) -> None:
    async def play() -> None:
        async with workers.opened() as episodes:
            one = await episodes.open(1, "e1")
            pid = process_of(one.first_observation)
            await one.close()
            (worker,) = episodes._workers
            line_to_it = await worker.ready("nobody")
            psutil.Process(pid).kill()
            deadline = time.monotonic() + 60.0
            while line_to_it.rank.death is None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            again = await episodes.open(2, "e2")
            assert process_of(again.first_observation) != pid

    workers.site.run(play())
    assert [state for _, state, _ in workers.said] == ["starting", "ready", "dead", "starting", "ready", "ended"]


def test_an_opening_that_nobody_waits_for_any_more_is_closed(workers: Workers) -> None:
    async def play() -> None:
        async with workers.opened() as episodes:
            opening = asyncio.ensure_future(episodes.open(1, "e1"))
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert process_of((await episodes.open(2, "e2")).first_observation)

    workers.site.run(play())
    assert set(workers.closed()) <= {"e1", "e2"}
    assert "e2" in workers.closed()


def test_an_environment_that_is_not_found_is_the_jobs_fault(workers: Workers) -> None:
    async def start() -> None:
        async with workers.opened(kind="rough_lake:Nowhere"):
            pass

    with pytest.raises(ConfigError, match="rough_lake has no class 'Nowhere'"):
        workers.site.run(start())
    assert [state for _, state, _ in workers.said] == ["starting", "dead"]
