"""The loop: one step makes one version, every version is proven, every trajectory settled, an alarm ends it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import Logged, a_job, a_run
from tiny_policy import VOCABULARY, tiny_policy

from rose.errors import (
    ClusterError,
    ContractError,
    EngineError,
    EnvironmentFailed,
    RoseError,
    SchedulerError,
    TrainingError,
)
from rose.ledger import Account
from rose.metrics import Metrics
from rose.records import Finish, Group, Outcome, Purpose, Trajectory, Turn, VersionSpan
from rose.status import StatusBoard
from rose.trainer.answering import known_answer, question
from rose.trainer.books import Books
from rose.trainer.engine_versions import Applied
from rose.trainer.evaluation import Evaluator
from rose.trainer.grpo import GrpoSettings, update
from rose.trainer.loop import Parts, TrainingLoop
from rose.trainer.optimizer import OptimizerSettings, WarmUpAdamW
from rose.trainer.policy import Policy, Weights, rounded_bf16
from rose.trainer.recorder import Recorder
from rose.trainer.rollout import Task
from rose.trainer.update_stats import UpdateStats
from rose.waits import WaitBoard
from rose_transfer.distribution.known_answer import KnownAnswer

Rule = Callable[[Task, int], dict[str, Any]]
"""What becomes of a task: changes to a completed trajectory, given the weight version that plays it."""

ACTIONS = 40
"""Turns of a trajectory here, so that a few of them are enough for the alarm."""


class Page:
    """An engine that counted what the rollout below made."""

    engine_id, incarnation = "engine-0", "a"

    def __init__(self) -> None:
        self.tokens = 0

    def total_tokens(self) -> int:
        return self.tokens

    def request_tokens(self, request_id: str) -> int:
        return 0


class ScriptedRollout:
    """Plays tasks by a rule, and books them as the real one does."""

    def __init__(self, books: Books, rule: Rule) -> None:
        self.version = 0
        self.tasks: list[Task] = []
        self._books, self._rule = books, rule
        self._page = Page()
        self._random = random.Random(0)
        books.watch(self._page)

    async def run(self, tasks: list[Task]) -> list[Trajectory]:
        self.tasks += tasks
        return [self._play(task) for task in tasks]

    def take_messages(self, trajectory_id: str) -> tuple[()]:
        return ()

    def _play(self, task: Task) -> Trajectory:
        changes = {"reward": 0.0, "outcome": Outcome.COMPLETED, **self._rule(task, self.version)}
        turns = changes.pop("turns", None)
        if turns is None:
            turns = tuple(self._turn() for _ in range(ACTIONS))
        self._books.open_trajectory(task.trajectory_id)
        self._books.start_request(f"{task.trajectory_id}.r", task.trajectory_id, self._page)
        self._books.end_request(f"{task.trajectory_id}.r", len(turns))
        self._page.tokens += len(turns)
        if task.purpose is Purpose.EVALUATION:
            self._books.settle(task.trajectory_id, Account.EVALUATION)
        elif changes["outcome"] is not Outcome.COMPLETED:
            self._books.settle(task.trajectory_id, Account(changes["outcome"].value))
        return Trajectory(
            task.trajectory_id, task.group_id, task.seed, task.purpose, turns, success=changes["reward"] > 0, **changes
        )

    def _turn(self) -> Turn:
        token = self._random.randrange(VOCABULARY)
        return Turn((token,), (token,), (-3.0,), (VersionSpan(self.version, 0, 1),), Finish.STOP)


class ScriptedVersions:
    """Takes every version at once; the rollout plays with it from then on."""

    def __init__(self, rollout: ScriptedRollout) -> None:
        self.published: dict[int, Weights] = {}
        self.answers: dict[int, KnownAnswer] = {}
        self._rollout = rollout

    async def publish(self, version: int, weights: Weights, answer: KnownAnswer) -> SimpleNamespace:
        assert version not in self.published
        self.published[version] = {name: tensor.clone() for name, tensor in weights.items()}
        self.answers[version] = answer
        return SimpleNamespace(update_bytes=1, model_bytes=1)

    async def applied(self, engine_id: str, version: int, timeout_s: float) -> Applied:
        assert version in self.published
        self._rollout.version = version
        return Applied(0.1, 1.0)


class ScriptedParity:
    """Proves every version but `bad`."""

    def __init__(self, bad: int | None) -> None:
        self.started: list[int] = []
        self.finished = 0
        self._bad = bad

    async def start(self, version: int) -> None:
        await self.finish()
        self.started.append(version)

    async def finish(self) -> None:
        self.finished += 1
        if self._bad in self.started:
            raise ContractError(f"version {self._bad} differs")


class TinyActor:
    """Trains a policy so small that nobody needs a process for it."""

    def __init__(self, policy: Policy) -> None:
        self.dies_at: int | None = None
        self._policy = policy
        self._optimizer = WarmUpAdamW(policy.parameters(), OptimizerSettings(1e-2, warm_up_updates=0))
        self._updates = 0
        self._rng = random.Random(0)

    async def update(self, groups: Sequence[Group]) -> UpdateStats:
        self._updates += 1
        if self._updates == self.dies_at:
            raise ClusterError("actor is dead")
        settings = GrpoSettings(1, 4096, 0.2, 0.28, 1.0, 1.0)
        return await asyncio.to_thread(update, self._policy, self._optimizer, groups, settings, self._rng)

    async def weights(self) -> Weights:
        return rounded_bf16(self._policy.weights())

    async def answer(self) -> KnownAnswer:
        return known_answer(self._policy, question(self._policy.vocabulary, 4), 2)


class ScriptedReference:
    """Finds everything at a distance that tells what it was asked of."""

    async def divergence(self, trajectories: Sequence[Trajectory]) -> float:
        return len(trajectories) / 8


class Bench:
    """A loop on a tiny real policy and scripted everything else."""

    def __init__(self, folder: Path, model: Path, rule: Rule, bad_parity: int | None = None, **sections: Any) -> None:
        self.books, waits = Books(), WaitBoard()
        job = a_job(model, folder, **sections)
        run = a_run(folder)
        self.recorder = Recorder(job, run, self.books, waits, StatusBoard(run, waits), Metrics(), lambda recorder: None)
        self.policy = tiny_policy()
        self.rollout = ScriptedRollout(self.books, rule)
        self.engine_versions = ScriptedVersions(self.rollout)
        self.parity = ScriptedParity(bad_parity)
        self.actor = TinyActor(self.policy)
        parts = Parts(
            actor=self.actor,
            reference=ScriptedReference(),
            rollout=self.rollout,  # type: ignore[arg-type]
            evaluator=Evaluator(self.rollout, job.evaluation),  # type: ignore[arg-type]
            engine_versions=self.engine_versions,  # type: ignore[arg-type]
            parity=self.parity,  # type: ignore[arg-type]
            books=self.books,
            recorder=self.recorder,
            engine_id="engine-0",
        )
        self._loop = TrainingLoop(job, parts)

    def run(self) -> None:
        asyncio.run(self._loop.run())

    def closes(self) -> dict[Account, int]:
        """The accounts after the books are closed; they must balance."""
        self.books.close()
        assert self.books.ledger.balanced(), self.books.ledger.violations()
        assert self.books.ledger.unsettled() == 0
        return self.books.ledger.accounts()


@pytest.fixture
def bench(tmp_path: Path, shipped_model: Path) -> Callable[..., Bench]:
    return lambda rule, **options: Bench(tmp_path, shipped_model, rule, **options)


def split(task: Task, version: int) -> dict[str, Any]:
    """Half of every group succeeds."""
    return {"reward": float(task.trajectory_id.endswith("0"))}


def test_a_run_is_steps_versions_and_evaluations_in_order(bench: Callable[..., Bench]) -> None:
    made = bench(split, evaluation={"episodes": 4, "every_steps": 1})
    made.run()
    assert list(made.engine_versions.published) == [1, 2, 3]
    assert made.parity.started == [0, 1, 2, 3]
    assert made.parity.finished == 5
    assert [(each.step, each.version) for each in made.recorder.evaluations] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(step.step, step.version) for step in made.recorder.steps] == [(1, 1), (2, 2), (3, 3)]
    assert made.recorder.versions_published == 3
    accounts = made.closes()
    assert accounts[Account.TRAINED] == 3 * 4 * ACTIONS
    assert accounts[Account.EVALUATION] == 4 * 4 * ACTIONS
    assert accounts[Account.ABORTED] == 0


def test_a_step_publishes_the_rounded_policy_that_it_trained(bench: Callable[..., Bench]) -> None:
    made = bench(split, train={"steps": 1})
    made.run()
    published = made.engine_versions.published[1]
    for name, tensor in made.policy.weights().items():
        assert torch.equal(published[name].float(), tensor.bfloat16().float()), name
    assert made.recorder.steps[0].changed_fraction == pytest.approx(1.0, abs=0.3)


def test_training_tasks_differ_from_step_to_step_and_from_the_held_out_ones(bench: Callable[..., Bench]) -> None:
    made = bench(split)
    made.run()
    seeds = {
        purpose: [task.seed for task in made.rollout.tasks if task.purpose is purpose]
        for purpose in (Purpose.TRAIN, Purpose.EVALUATION)
    }
    assert len(set(seeds[Purpose.TRAIN])) == 3 * 2
    assert not set(seeds[Purpose.TRAIN]) & set(seeds[Purpose.EVALUATION])
    assert len({task.trajectory_id for task in made.rollout.tasks}) == len(made.rollout.tasks)


def test_groups_without_variance_are_settled_as_such_and_change_nothing(bench: Callable[..., Bench]) -> None:
    made = bench(lambda task, version: {"reward": 1.0})
    made.run()
    accounts = made.closes()
    assert (accounts[Account.ZERO_VARIANCE], accounts[Account.TRAINED]) == (3 * 4 * ACTIONS, 0)
    assert [step.changed_fraction for step in made.recorder.steps] == [0.0, 0.0, 0.0]
    assert [step.groups_zero_variance for step in made.recorder.steps] == [2, 2, 2]


def test_the_log_says_which_update_took_a_trajectory_in(bench: Callable[..., Bench], logged: Logged) -> None:
    bench(lambda task, version: {"reward": 1.0} if "g0" in task.trajectory_id else split(task, version)).run()
    for trajectory_id, into in (("s2g0-1", "zero_variance"), ("s2g1-1", "trained")):
        (update,) = (one for one in logged.of(trajectory_id) if one["event"] == "update")
        assert update["version"] == 2
        assert [what for what, those in update.items() if isinstance(those, list) and trajectory_id in those] == [into]


def test_failed_and_empty_trajectories_are_data(bench: Callable[..., Bench]) -> None:
    def rule(task: Task, version: int) -> dict[str, Any]:
        if task.trajectory_id.endswith("g0-0"):
            return {"outcome": Outcome.ENVIRONMENT_FAILED, "failure": "environment: x: its step raised E: boom"}
        if task.trajectory_id.endswith("g0-1"):
            return {"turns": (), "reward": 1.0}
        return split(task, version)

    made = bench(rule)
    made.run()
    accounts = made.closes()
    assert accounts[Account.ENVIRONMENT_FAILED] == 3 * ACTIONS
    assert accounts[Account.TRAINED] == 3 * 2 * ACTIONS
    assert made.recorder.steps[0].outcomes == {"completed": 3, "environment-failed": 1}
    assert dict(made.recorder.failures) == {"its step raised E: boom": 3}


def failing_until(
    last_failing_version: int, outcome: Outcome, failed_at: str = "environment"
) -> Callable[[Task, int], dict[str, Any]]:
    """Nothing comes to its end in training under version 0 up to `last_failing_version`."""

    def rule(task: Task, version: int) -> dict[str, Any]:
        if task.purpose is Purpose.EVALUATION or version > last_failing_version:
            return split(task, version)
        return {"outcome": outcome, "turns": (), "failure": "all down", "failed_at": failed_at}

    return rule


def test_environments_that_are_down_for_two_steps_do_not_end_the_run(bench: Callable[..., Bench]) -> None:
    made = bench(failing_until(1, Outcome.ENVIRONMENT_FAILED))
    made.run()
    assert list(made.engine_versions.published) == [1, 2, 3]
    made.closes()


def test_environments_that_never_work_end_the_run_after_three_steps(bench: Callable[..., Bench]) -> None:
    made = bench(failing_until(9, Outcome.ENVIRONMENT_FAILED))
    with pytest.raises(EnvironmentFailed, match=r"not one of .* came to its end"):
        made.run()
    assert list(made.engine_versions.published) == [1, 2]
    made.closes()


@pytest.mark.parametrize("error", [EngineError("no"), SchedulerError("no lease")])
def test_who_refuses_everybody_ends_the_run_at_once(bench: Callable[..., Bench], error: RoseError) -> None:
    made = bench(failing_until(9, Outcome.ABORTED, error.boundary))
    with pytest.raises(type(error), match="not one of"):
        made.run()
    assert list(made.engine_versions.published) == []
    made.closes()


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_version_that_lost_the_format_ends_the_run_and_names_the_last_good_one(
    bench: Callable[..., Bench], in_evaluation: bool
) -> None:
    def rule(task: Task, version: int) -> dict[str, Any]:
        return {**split(task, version), "malformed_actions": ACTIONS if version == 2 else 1}

    made = bench(rule, evaluation={"episodes": 4, "every_steps": int(in_evaluation)})
    with pytest.raises(TrainingError, match=r"version 2 acts malformed in 100%.* version 1 did"):
        made.run()
    (alarm,) = made.recorder.alarms
    assert (alarm.version, len(made.recorder.steps)) == (2, 2)
    assert list(made.engine_versions.published) == [1, 2]
    accounts = made.closes()
    assert accounts[Account.TRAINED] == 2 * 4 * ACTIONS
    assert accounts[Account.ABORTED] == (0 if in_evaluation else 4 * ACTIONS)


def test_the_last_version_is_proven_before_the_run_is_called_finished(bench: Callable[..., Bench]) -> None:
    made = bench(split, bad_parity=3)
    with pytest.raises(ContractError, match="version 3 differs"):
        made.run()
    assert len(made.recorder.evaluations) == 1
    made.closes()


def test_parity_is_asked_for_as_often_as_the_job_says(bench: Callable[..., Bench]) -> None:
    made = bench(split, weights={"parity_every_steps": 2})
    made.run()
    assert made.parity.started == [0, 2]


def test_parity_can_be_left_out(bench: Callable[..., Bench]) -> None:
    made = bench(split, weights={"parity_every_steps": 0})
    made.run()
    assert made.parity.started == []


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_published(bench: Callable[..., Bench]) -> None:
    made = bench(split)
    with torch.no_grad():
        for parameter in made.policy.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(TrainingError, match="loss"):
        made.run()
    assert made.engine_versions.published == {}
    assert made.closes()[Account.ABORTED] == 4 * ACTIONS


def test_every_step_tells_how_far_its_policy_was_from_the_first_one(bench: Callable[..., Bench]) -> None:
    made = bench(split)
    made.run()
    assert [step.reference_kl for step in made.recorder.steps] == [4 / 8] * 3


def test_an_actor_that_is_lost_ends_the_run_with_all_tokens_accounted_for(bench: Callable[..., Bench]) -> None:
    made = bench(split)
    made.actor.dies_at = 2
    with pytest.raises(ClusterError, match="actor is dead"):
        made.run()
    accounts = made.closes()
    assert (accounts[Account.TRAINED], accounts[Account.ABORTED]) == (4 * ACTIONS, 4 * ACTIONS)
    assert list(made.engine_versions.published) == [1]
