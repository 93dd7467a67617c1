"""Ranks in processes of their own: what they compute, what they raise, and how their deaths are told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray_site import RaySite
from stand_ins import a_job
from tiny_policy import a_group

from rose.errors import ClusterError, ConfigError, DeadlineExceeded, RoseError, TrainingError
from rose.trainer.actor_rank import ActorRank
from rose.trainer.all_of import all_of
from rose.trainer.cluster import local_cluster
from rose.trainer.rank import Rank
from rose.trainer.ranks import Ranks, open_ranks
from rose.trainer.reference_rank import ReferenceRank

pytestmark = pytest.mark.timeout(240)
PATIENCE = {"start_timeout_s": 180.0, "call_timeout_s": 120.0}


class Thing:
    """What a rank's process may hold."""

    def __init__(self, value: int | None) -> None:
        if value is None:
            raise ConfigError("no value", to_do="give one")
        self._value = value

    def plus(self, other: int) -> int:
        return self._value + other

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self, error: Exception) -> None:
        raise error

    def end(self, status: int) -> None:
        os._exit(status)


@pytest.fixture(autouse=True, scope="module")
def _found_by_value(ray_site: RaySite) -> None:
    """A rank's process does not find test modules by their names."""
    ray_site.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def rank(ray_site: RaySite) -> Rank:
    """One that holds a thing of value 3."""
    made = ray_site.rank()
    ray_site.run(made.start(Thing, 3, timeout_s=60.0))
    return made


def test_a_rank_answers_from_a_process_of_its_own(ray_site: RaySite) -> None:
    rank = ray_site.rank("alone")
    pid = ray_site.run(rank.start(Thing, 3, timeout_s=60.0))
    assert pid != os.getpid()
    assert psutil.Process(pid).is_running()
    assert ray_site.call(rank, "plus", 4) == 7
    rank.kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)
    with pytest.raises(ClusterError, match="alone is dead"):
        ray_site.call(rank, "plus", 4)


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("the loss is nan", expected="a finite loss", to_do="go on more slowly"),
        DeadlineExceeded("too late", boundary="engine"),
    ],
)
def test_our_errors_come_back_as_they_were_raised(ray_site: RaySite, rank: Rank, error: RoseError) -> None:
    with pytest.raises(type(error)) as raised:
        ray_site.call(rank, "fail", error)
    assert (str(raised.value), raised.value.to_do) == (str(error), error.to_do)


def test_any_other_error_is_the_ranks_and_it_lives_on(ray_site: RaySite, rank: Rank) -> None:
    with pytest.raises(ClusterError, match=r"thing-\d+: ZeroDivisionError: by what"):
        ray_site.call(rank, "fail", ZeroDivisionError("by what"))
    assert ray_site.call(rank, "plus", 1) == 4


def test_what_cannot_be_made_is_told_by_whoever_refuses_it(ray_site: RaySite) -> None:
    with pytest.raises(ConfigError, match="no value; give one"):
        ray_site.run(ray_site.rank().start(Thing, None, timeout_s=60.0))


@pytest.mark.parametrize(("by_us", "why"), [(True, "it was ended"), (False, "its process was killed")])
def test_a_death_in_the_middle_of_a_call_is_told_at_once(ray_site: RaySite, by_us: bool, why: str) -> None:
    rank = ray_site.rank()
    pid = ray_site.run(rank.start(Thing, 3, timeout_s=60.0))

    async def call_and_end() -> None:
        call = asyncio.ensure_future(rank.call("wait", 100.0, what="end", timeout_s=60.0))
        await asyncio.sleep(0.2)
        assert [wait.whom for wait in ray_site.waits.snapshot()] == [rank.name]
        if by_us:
            rank.kill()
        else:
            os.kill(pid, signal.SIGKILL)
        await call

    with pytest.raises(ClusterError, match=f"is dead: {why}"):
        ray_site.run(call_and_end())


def test_a_rank_that_does_not_answer_is_named(ray_site: RaySite, rank: Rank) -> None:
    with pytest.raises(DeadlineExceeded, match=rf"{rank.name}: no wait after 0.2 s"):
        ray_site.call(rank, "wait", 30.0, timeout_s=0.2)
    rank.kill()


def test_a_second_cluster_in_a_process_is_refused(ray_site: RaySite, tmp_path: Path) -> None:
    async def open_another() -> None:
        async with local_cluster(tmp_path, "another", ray_site.waits, 300.0):
            pass

    with pytest.raises(ClusterError, match="has a Ray cluster already"):
        ray_site.run(open_another())


def test_remote_ranks_compute_what_local_ones_do(ray_site: RaySite, shipped_model: Path, tmp_path: Path) -> None:
    job = a_job(shipped_model, tmp_path, train={"steps": 1, "threads": 1})
    groups = [a_group(random.Random(seed), [1.0, 0.0, 1.0, 0.0], name=f"g{seed}") for seed in range(3)]
    trajectories = [one for group in groups for one in group.trajectories]
    said: list[tuple[str, str]] = []

    async def train(ranks: Ranks) -> Any:
        before = await ranks.actor.weights()
        stats, divergence = await all_of(ranks.actor.update(groups), ranks.reference.divergence(trajectories))
        return before, stats, divergence, await ranks.actor.weights()

    async def both() -> Any:
        told = lambda name, state, detail: said.append((name, state))  # noqa: E731
        async with open_ranks(ray_site.ray, job, ray_site.waits, logs=ray_site.logs, told=told, **PATIENCE) as ranks:
            return await train(ranks)

    before, stats, divergence, after = ray_site.run(both())
    local, reference = ActorRank(job), ReferenceRank(job)
    assert all(torch.equal(tensor, before[name]) for name, tensor in local.weights().items())
    assert local.update(groups) == stats
    assert all(torch.equal(tensor, after[name]) for name, tensor in local.weights().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert reference.divergence(trajectories) == divergence > 0
    assert {(name, state) for name, state in said} == {
        (name, state) for name in ("actor", "reference") for state in ("starting", "ready", "ended")
    }


def test_ranks_of_a_folder_that_is_no_model_leave_no_process(ray_site: RaySite, tmp_path: Path) -> None:
    job = a_job(tmp_path / "none", tmp_path)

    async def start() -> None:
        async with open_ranks(ray_site.ray, job, ray_site.waits, logs=ray_site.logs, told=lambda *_: None, **PATIENCE):
            pass

    with pytest.raises(ConfigError, match="does not exist"):
        ray_site.run(start())


def test_the_reference_has_not_moved_from_itself(shipped_model: Path, tmp_path: Path) -> None:
    reference = ReferenceRank(a_job(shipped_model, tmp_path, train={"threads": 1}))
    assert reference.divergence([]) == 0.0
