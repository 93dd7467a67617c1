"""Ranks in processes of their own: what they compute, what they raise, and how their deaths are told."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from stand_ins import a_job
from tiny_policy import a_group

from rose.errors import ClusterError, ConfigError, DeadlineExceeded, RoseError, TrainingError
from rose.trainer.actor_rank import ActorRank
from rose.trainer.all_of import all_of
from rose.trainer.cluster import local_cluster
from rose.trainer.rank import Rank
from rose.trainer.ranks import Ranks, open_ranks
from rose.trainer.reference_rank import ReferenceRank
from rose.waits import WaitBoard

# Not imported here: it looks at its environment when it is.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
T = TypeVar("T")
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


class Site:
    """One event loop and one Ray for the tests of this file."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.waits = WaitBoard()
        self.logs = folder / "log.jsonl"
        self._runner = runner
        self._count = 0
        self._cluster = local_cluster(folder, "test", self.waits)
        self.ray = runner.run(self._cluster.__aenter__())
        # A rank's process does not find test modules by their names.
        self.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def rank(self, value: int | None = 3) -> Rank:
        self._count += 1
        rank = Rank(self.ray, f"thing-{self._count}", self.waits, logs=self.logs)
        self.run(rank.start(Thing, value, timeout_s=60.0))
        return rank

    def call(self, rank: Rank, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        return self.run(rank.call(method, *arguments, what=method, timeout_s=timeout_s))

    def close(self) -> None:
        self._runner.run(self._cluster.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with asyncio.Runner() as runner:
        made = Site(runner, tmp_path_factory.mktemp("ranks"))
        yield made
        made.close()
        assert made.waits.snapshot() == ()


def test_a_rank_answers_from_a_process_of_its_own(site: Site) -> None:
    rank = Rank(site.ray, "alone", site.waits, logs=site.logs)
    pid = site.run(rank.start(Thing, 3, timeout_s=60.0))
    assert pid != os.getpid()
    assert psutil.Process(pid).is_running()
    assert site.call(rank, "plus", 4) == 7
    rank.kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)
    with pytest.raises(ClusterError, match="alone is dead"):
        site.call(rank, "plus", 4)


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("the loss is nan", expected="a finite loss", to_do="go on more slowly"),
        DeadlineExceeded("too late", boundary="engine"),
    ],
)
def test_our_errors_come_back_as_they_were_raised(site: Site, error: RoseError) -> None:
    with pytest.raises(type(error)) as raised:
        site.call(site.rank(), "fail", error)
    assert (str(raised.value), raised.value.to_do) == (str(error), error.to_do)


def test_any_other_error_is_the_ranks_and_it_lives_on(site: Site) -> None:
    rank = site.rank()
    with pytest.raises(ClusterError, match=r"thing-\d+: ZeroDivisionError: by what"):
        site.call(rank, "fail", ZeroDivisionError("by what"))
    assert site.call(rank, "plus", 1) == 4


def test_what_cannot_be_made_is_told_by_whoever_refuses_it(site: Site) -> None:
    with pytest.raises(ConfigError, match="no value; give one"):
        site.rank(None)


@pytest.mark.parametrize("end", [lambda rank: rank, lambda rank: os.kill(rank, signal.SIGKILL)])
def test_a_death_in_the_middle_of_a_call_is_told_at_once(site: Site, end: Callable[[int], object]) -> None:
    rank = Rank(site.ray, f"dies-{id(end)}", site.waits, logs=site.logs)
    pid = site.run(rank.start(Thing, 3, timeout_s=60.0))

    async def call_and_end() -> None:
        call = asyncio.ensure_future(rank.call("wait", 100.0, what="end", timeout_s=60.0))
        await asyncio.sleep(0.2)
        assert [wait.whom for wait in site.waits.snapshot()] == [rank.name]
        if end(pid) == pid:
            rank.kill()
        await call

    with pytest.raises(ClusterError, match="is dead: its process was killed"):
        site.run(call_and_end())


def test_a_rank_that_does_not_answer_is_named(site: Site) -> None:
    rank = site.rank()
    with pytest.raises(DeadlineExceeded, match=rf"{rank.name}: no wait after 0.2 s"):
        site.call(rank, "wait", 30.0, timeout_s=0.2)
    rank.kill()


def test_a_second_cluster_in_a_process_is_refused(site: Site, tmp_path: Path) -> None:
    async def open_another() -> None:
        async with local_cluster(tmp_path, "another", site.waits):
            pass

    with pytest.raises(ClusterError, match="has a Ray cluster already"):
        site.run(open_another())


def test_remote_ranks_compute_what_local_ones_do(site: Site, shipped_model: Path, tmp_path: Path) -> None:
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
        async with open_ranks(site.ray, job, site.waits, logs=site.logs, told=told, **PATIENCE) as ranks:
            return await train(ranks)

    before, stats, divergence, after = site.run(both())
    local, reference = ActorRank(job), ReferenceRank(job)
    assert all(torch.equal(tensor, before[name]) for name, tensor in local.weights().items())
    assert local.update(groups) == stats
    assert all(torch.equal(tensor, after[name]) for name, tensor in local.weights().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert reference.divergence(trajectories) == divergence > 0
    assert {(name, state) for name, state in said} == {
        (name, state) for name in ("actor", "reference") for state in ("starting", "ready", "ended")
    }


def test_ranks_of_a_folder_that_is_no_model_leave_no_process(site: Site, tmp_path: Path) -> None:
    job = a_job(tmp_path / "none", tmp_path)

    async def start() -> None:
        async with open_ranks(site.ray, job, site.waits, logs=site.logs, told=lambda *_: None, **PATIENCE):
            pass

    with pytest.raises(ConfigError, match="does not exist"):
        site.run(start())


def test_the_reference_has_not_moved_from_itself(shipped_model: Path, tmp_path: Path) -> None:
    reference = ReferenceRank(a_job(shipped_model, tmp_path, train={"threads": 1}))
    assert reference.divergence([]) == 0.0


KILLED = """
import asyncio, os, sys, time
from pathlib import Path
from rose.trainer.cluster import local_cluster
from rose.waits import WaitBoard

async def main():
    async with local_cluster(Path(sys.argv[1]), "killed", WaitBoard()):
        print("up", flush=True)
        time.sleep(600)

asyncio.run(main())
"""


def test_nothing_of_ray_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    _, left = psutil.wait_procs(family, timeout=30)
    assert left == []
