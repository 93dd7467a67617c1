"""Rollouts: a task always comes back as one trajectory, and its trouble stays its own."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from stand_ins import (
    END,
    Answer,
    Asked,
    Logged,
    Lost,
    Refused,
    Script,
    ScriptedScheduler,
    ScriptedSupervisor,
    Silent,
    World,
)

from rose.env.chat import ChatRenderer
from rose.env.contract import StepResult
from rose.env.host import EnvironmentHost, HostSettings
from rose.errors import EngineError, EnvironmentFailed, SchedulerError
from rose.ledger import Account
from rose.records import Outcome, Purpose, Trajectory
from rose.trainer.books import Books
from rose.trainer.probe_prompts import probe_prompts
from rose.trainer.rollout import Rollout, Task, why_none_completed
from rose.trainer.sampler import SamplingSettings, TurnSampler
from rose.waits import WaitBoard
from rose_scheduler.client import LeaseRefused, Turn
from rose_scheduler.events import Reason

A_WORD = 40
CONTEXT = 256


def answers(asked: Asked) -> Answer:
    return Answer((A_WORD, END))


def a_task(index: int = 0, **changes: Any) -> Task:
    return replace(Task(f"t{index}", "g", index, Purpose.TRAIN, 0, 1), **changes)


class Bench:
    """Rollouts of one world on a scripted engine, with real renderer, host and books."""

    def __init__(self, books: Books, renderer: ChatRenderer) -> None:
        self.books = books
        self._renderer = renderer
        self.supervisor: ScriptedSupervisor
        self.rollout: Rollout

    def play(
        self,
        world: World,
        tasks: list[Task],
        script: Script = answers,
        *,
        turns_max: int = 8,
        settings: HostSettings | None = None,
        renderer: ChatRenderer | None = None,
    ) -> list[Trajectory]:
        async def body() -> list[Trajectory]:
            self.build(world, script, turns_max, settings, renderer)
            return await self.rollout.run(tasks)

        return asyncio.run(body())

    def build(
        self,
        world: World,
        script: Script,
        turns_max: int = 8,
        settings: HostSettings | None = None,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.supervisor = ScriptedSupervisor(script, self.books.watch)
        sampling = SamplingSettings(1.0, 4, (END,), attempts_max=2, lease_wait_s=5.0, lease_hold_s=5.0)
        self.scheduler = ScriptedScheduler(self.supervisor)
        self.rollout = Rollout(
            TurnSampler(self.scheduler, self.scheduler, self.books, sampling),  # type: ignore[arg-type]
            EnvironmentHost(world.make, WaitBoard(), settings),
            renderer or self._renderer,
            self.books,
            context_tokens_max=CONTEXT,
            turns_max=turns_max,
            concurrency=4,
        )

    def closes(self) -> dict[Account, int]:
        """The accounts after the books are closed; they must balance."""
        self.books.close()
        assert self.books.ledger.balanced(), self.books.ledger.violations()
        assert self.books.ledger.unsettled() == 0
        return self.books.ledger.accounts()


@pytest.fixture
def bench(books: Books, renderer: ChatRenderer) -> Bench:
    return Bench(books, renderer)


def fails_for(bad: int, failure: Callable[[], Any]) -> Callable[[int, str], str]:
    def reset(seed: int, episode_id: str) -> Any:
        return failure() if seed == bad else "begin"

    return reset


def raises() -> Any:
    raise RuntimeError("no room at the inn")


def raises_a_book() -> Any:
    raise RuntimeError("x" * 10_000_000)


def test_an_episode_is_recorded_turn_by_turn_as_the_engine_saw_it(bench: Bench) -> None:
    rewards = [0.5, -0.25, 1.0]
    world = World(step=lambda action, i: StepResult("next", rewards[i], i == 2, False, i == 1, i == 2))
    (trajectory,) = bench.play(world, [a_task()])
    assert trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.reward, trajectory.success, trajectory.malformed_actions) == (1.25, True, 1)
    (segment,) = trajectory.segments()
    contexts = [asked.token_ids for asked in bench.supervisor.asked]
    assert segment.token_ids == (*contexts[-1], A_WORD, END)
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(contexts))
    assert world.closed == 1
    assert bench.books.ledger.accounts()[Account.IN_FLIGHT] == 6  # the update decides where these go


def test_a_trajectorys_end_stands_in_the_log_under_its_id(bench: Bench, logged: Logged) -> None:
    world = World(step=lambda action, i: raises() if i == 1 else StepResult("next", 0.5, False, False))
    bench.play(world, [a_task()])
    first, second, end, _ = logged.of("t0")
    assert [first["event"], second["event"], end["event"]] == ["turn sampled", "turn sampled", "trajectory ended"]
    assert (end["outcome"], end["reward"], end["turns"], end["tokens"]) == ("environment-failed", 0.5, 2, 4)
    assert end["group_id"] == "g"
    assert "its step raised" in end["why"]


@pytest.mark.parametrize("failure", [raises, raises_a_book, lambda: None, lambda: "\ud800", lambda: "x" * 10_000_000])
def test_an_environment_that_fails_at_reset_costs_its_own_trajectory_alone(
    bench: Bench, failure: Callable[[], Any]
) -> None:
    world = World(reset=fails_for(1, failure))
    played = bench.play(world, [a_task(i) for i in range(4)])
    assert [each.trajectory_id for each in played] == ["t0", "t1", "t2", "t3"]
    outcomes = [each.outcome for each in played]
    assert outcomes == [Outcome.COMPLETED, Outcome.ENVIRONMENT_FAILED, Outcome.COMPLETED, Outcome.COMPLETED]
    assert "environment t1" in played[1].failure
    assert len(played[1].failure) <= 1000
    assert world.closed == 4


def test_what_was_sampled_before_a_step_failed_is_kept_and_accounted(bench: Bench) -> None:
    world = World(step=lambda action, i: raises() if i == 1 else StepResult("next", 0.0, False, False))
    (trajectory,) = bench.play(world, [a_task()])
    assert trajectory.outcome is Outcome.ENVIRONMENT_FAILED
    assert trajectory.output_tokens == 4
    assert bench.closes()[Account.ENVIRONMENT_FAILED] == 4


def test_an_environment_that_hangs_ends_with_its_deadline_and_holds_up_nobody(bench: Bench) -> None:
    release = threading.Event()

    def step(action: str, index: int) -> StepResult:
        if threading.current_thread().name.endswith(" t2"):
            release.wait(10)
        return StepResult("next", 0.0, index >= 1, False)

    settings = HostSettings(step_timeout_s=0.1)
    try:
        played = bench.play(World(step=step), [a_task(i) for i in range(4)], settings=settings)
    finally:
        release.set()
    assert [each.outcome for each in played].count(Outcome.COMPLETED) == 3
    assert played[2].outcome is Outcome.ENVIRONMENT_FAILED
    assert "no step after 0.1 s" in played[2].failure
    assert bench.closes()[Account.ENVIRONMENT_FAILED] == 2


def test_an_observation_beyond_the_context_truncates_before_it_is_encoded(bench: Bench) -> None:
    encoded: list[int] = []

    class Watching(ChatRenderer):
        def encode(self, text: str) -> tuple[int, ...]:
            encoded.append(len(text))
            return super().encode(text)

    renderer = Watching(bench._renderer._tokenizer)
    encoded.clear()
    world = World(step=lambda action, i: StepResult("x" * 900_000, 0.0, False, False))
    (trajectory,) = bench.play(world, [a_task()], renderer=renderer)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert "900000 characters" in trajectory.failure
    assert max(encoded) < 1000
    assert bench.closes()[Account.TRUNCATED] == 2


def test_a_system_prompt_beyond_the_context_truncates_too(bench: Bench) -> None:
    (trajectory,) = bench.play(World(system_prompt="x" * 900_000), [a_task()])
    assert trajectory.outcome is Outcome.TRUNCATED
    assert "900000 characters" in trajectory.failure


def test_a_context_that_fills_up_turn_by_turn_truncates_and_never_overflows(bench: Bench) -> None:
    world = World(step=lambda action, i: StepResult("abcdefgh" * 5, 0.0, False, False))
    (trajectory,) = bench.play(world, [a_task()], turns_max=100)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert "the context holds 256" in trajectory.failure
    assert 2 <= len(trajectory.turns) < 100
    assert all(len(asked.token_ids) + asked.max_tokens <= CONTEXT for asked in bench.supervisor.asked)
    assert bench.closes()[Account.TRUNCATED] == trajectory.output_tokens > 0


def test_turns_are_capped_and_the_episode_stays_trainable(bench: Bench) -> None:
    world = World(step=lambda action, i: StepResult("next", 1.0, False, False))
    (trajectory,) = bench.play(world, [a_task()], turns_max=3)
    assert (trajectory.outcome, len(trajectory.turns), trajectory.reward) == (Outcome.COMPLETED, 3, 3.0)
    assert world.closed == 1


def test_what_the_last_turn_shows_is_not_looked_at(bench: Bench) -> None:
    # Nobody will answer it, so it cannot be too long.
    world = World(step=lambda action, i: StepResult("x" * 900_000 if i == 1 else "next", 0.0, False, False))
    (trajectory,) = bench.play(world, [a_task()], turns_max=2)
    assert trajectory.outcome is Outcome.COMPLETED


def test_a_rewritten_prefix_begins_a_new_segment_with_its_whole_context(bench: Bench) -> None:
    class Forgetting(ChatRenderer):
        """A template that drops all but the last two messages once there are more than three."""

        def render(self, messages: Any, *, add_generation_prompt: bool = True) -> str:
            kept = messages if len(messages) <= 3 else messages[-2:]
            return super().render(kept, add_generation_prompt=add_generation_prompt)

    renderer = Forgetting(bench._renderer._tokenizer)
    (trajectory,) = bench.play(World(system_prompt=""), [a_task()], renderer=renderer)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.starts_segment for turn in trajectory.turns] == [False, False, True]
    assert len(trajectory.segments()) == 2
    assert bench.supervisor.asked[2].token_ids == trajectory.turns[2].context_ids


def test_an_engine_that_refuses_one_turn_aborts_that_trajectory_alone(bench: Bench) -> None:
    def script(asked: Asked) -> Answer | Refused:
        return Refused() if asked.request_id.startswith("t1.1.") else answers(asked)

    played = bench.play(World(), [a_task(i) for i in range(3)], script)
    assert [each.outcome for each in played] == [Outcome.COMPLETED, Outcome.ABORTED, Outcome.COMPLETED]
    assert "refused" in played[1].failure
    assert bench.closes()[Account.ABORTED] == 2 + 12


def test_a_scheduler_that_refuses_one_lease_aborts_that_trajectory_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ScriptedScheduler.lease

    def lease(self: ScriptedScheduler, turn: Turn, **terms: float) -> Any:
        if (turn.trajectory_id, turn.number) == ("t1", 1):
            raise LeaseRefused(Reason.CONFLICT, "another group")
        return real(self, turn, **terms)

    monkeypatch.setattr(ScriptedScheduler, "lease", lease)
    played = bench.play(World(), [a_task(i) for i in range(3)])
    assert [each.outcome for each in played] == [Outcome.COMPLETED, Outcome.ABORTED, Outcome.COMPLETED]
    assert "the lease is refused (conflict)" in played[1].failure
    assert bench.closes()[Account.ABORTED] == 2 + 12


def test_turns_are_leased_for_their_group_and_the_version_that_the_task_asks_for(bench: Bench) -> None:
    bench.play(World(), [a_task(0, min_version=7)])
    leased = bench.scheduler.leased
    assert {(turn.trajectory_id, turn.group_id, turn.min_version) for turn in leased} == {("t0", "g", 7)}
    assert [turn.number for turn in leased] == [0, 1, 2]
    assert [turn.context_tokens for turn in leased] == [len(asked.token_ids) for asked in bench.supervisor.asked]
    assert {(turn.group_size, turn.evaluation) for turn in leased} == {(1, False)}


def test_the_scheduler_hears_of_every_trajectory_that_is_over_however_it_ended(bench: Bench) -> None:
    def reset(seed: int, episode_id: str) -> str:
        if seed == 1:
            raise RuntimeError("down")
        return "begin"

    tasks = [a_task(0), a_task(1), a_task(2, purpose=Purpose.EVALUATION, group_size=5)]
    bench.play(World(reset=reset), tasks)
    assert sorted(bench.scheduler.over_ids) == ["t0", "t1", "t2"]
    evaluated = [turn for turn in bench.scheduler.leased if turn.trajectory_id == "t2"]
    assert {(turn.group_size, turn.evaluation) for turn in evaluated} == {(5, True)}


def test_an_engine_that_refuses_everybody_is_told_by_its_first_refusal(bench: Bench) -> None:
    played = bench.play(World(), [a_task(i) for i in range(3)], lambda asked: Refused())
    why = why_none_completed(played)
    assert isinstance(why, EngineError)
    assert re.search(r"not one of 3 trajectories.*refused t0\.0\.0", str(why))
    bench.closes()


class Blocking:
    """The first step of all does not await until `release`; every other call would answer at once."""

    system_prompt = "do"

    def __init__(self, release: threading.Event) -> None:
        self._waits = iter([release.wait])

    def make(self) -> Any:
        return self

    async def reset(self, seed: int, episode_id: str) -> str:
        return "begin"

    async def step(self, action: str) -> StepResult:
        next(self._waits, bool)()
        return StepResult("next", 0.0, True, False)

    async def close(self) -> None: ...


def test_an_environment_that_does_not_await_is_the_cause_that_everybody_tells(bench: Bench) -> None:
    release = threading.Event()
    tasks = [a_task(i) for i in range(4)]

    async def play() -> list[Trajectory]:
        settings = HostSettings(reset_timeout_s=1, step_timeout_s=1, close_timeout_s=0.05)
        bench.build(Blocking(release), answers, settings=settings)  # type: ignore[arg-type]
        return [*await bench.rollout.run(tasks), *await bench.rollout.run([a_task(4)])]

    played = asyncio.run(play())
    release.set()
    assert {each.outcome for each in played} == {Outcome.ENVIRONMENT_FAILED}
    for each in played:
        assert re.search(r"step of environment t\d does not await, and holds up all other async calls", each.failure)
    why = why_none_completed(played)
    assert isinstance(why, EnvironmentFailed)
    assert "does not await" in str(why)
    bench.closes()


def ended(outcome: Outcome, failed_at: str = "environment") -> Trajectory:
    return Trajectory("t", "g", 0, Purpose.TRAIN, (), 0.0, False, outcome, failure="for a reason", failed_at=failed_at)


def test_one_completed_trajectory_is_enough() -> None:
    assert why_none_completed([ended(Outcome.ABORTED), ended(Outcome.COMPLETED)]) is None


@pytest.mark.parametrize("most", [Outcome.ENVIRONMENT_FAILED, Outcome.TRUNCATED])
def test_what_ended_most_is_to_blame(most: Outcome) -> None:
    why = why_none_completed([ended(Outcome.ABORTED), ended(most), ended(most)])
    assert isinstance(why, EnvironmentFailed)
    assert f"2 are {most}" in str(why)


def test_a_scheduler_that_refused_everybody_is_to_blame_and_not_the_engine() -> None:
    assert isinstance(why_none_completed([ended(Outcome.ABORTED, "scheduler")] * 2), SchedulerError)
    assert isinstance(why_none_completed([ended(Outcome.ABORTED, "engine")]), EngineError)


def test_an_engine_that_dies_in_mid_turn_leaves_a_turn_of_two_parts(bench: Bench) -> None:
    def script(asked: Asked) -> Answer | Lost:
        return Lost((A_WORD,), generated=3) if asked.request_id == "t0.1.0" else answers(asked)

    (trajectory,) = bench.play(World(), [a_task()], script)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [len(turn.requests) for turn in trajectory.turns] == [1, 2, 1]
    assert trajectory.turns[1].output_ids == (A_WORD, A_WORD, END)
    assert bench.closes()[Account.UNRECEIVED] == 2


def test_evaluation_tokens_are_settled_as_such_whatever_became_of_them(bench: Bench) -> None:
    tasks = [a_task(i, purpose=Purpose.EVALUATION) for i in range(2)]
    bench.play(World(step=lambda action, i: raises()), tasks)
    assert bench.closes()[Account.EVALUATION] == 4


def test_messages_are_kept_for_who_asked_and_handed_out_once(bench: Bench) -> None:
    bench.play(World(), [a_task(0, keep_messages=True), a_task(1)])
    kept = bench.rollout.take_messages("t0")
    assert [message["role"] for message in kept][:3] == ["system", "user", "assistant"]
    assert bench.rollout.take_messages("t0") == ()
    assert bench.rollout.take_messages("t1") == ()


def test_a_cancelled_rollout_leaves_books_that_close(bench: Bench) -> None:
    def script(asked: Asked) -> Answer | Silent:
        return Silent(generated=5) if asked.request_id.startswith("t1.") else answers(asked)

    world = World()

    async def body() -> None:
        bench.build(world, script)
        running = asyncio.create_task(bench.rollout.run([a_task(i) for i in range(3)]))
        while not {"t0", "t1", "t2"} <= {asked.request_id.partition(".")[0] for asked in bench.supervisor.asked}:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())
    accounts = bench.closes()
    assert accounts[Account.UNRECEIVED] == 5
    assert accounts[Account.ABORTED] == bench.books.ledger.generated() - 5
    assert world.closed == 3


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (World(reset=lambda seed, episode_id: raises()), "raised RuntimeError"),
        (World(reset=lambda seed, episode_id: "x" * 900_000), "900000 characters"),
        (World(reset=lambda seed, episode_id: "x" * 300), "the context holds 256"),
    ],
)
def test_a_first_prompt_is_whole_or_a_failure_of_its_environment(bench: Bench, world: World, words: str) -> None:
    async def body(world: World) -> tuple[int, ...]:
        bench.build(world, answers)
        return await bench.rollout.first_prompt(7, "probe-0")

    with pytest.raises(EnvironmentFailed, match=words):
        asyncio.run(body(world))
    good = World()
    prompt = asyncio.run(body(good))
    bench.play(World(), [a_task()])
    assert prompt == bench.supervisor.asked[0].token_ids
    assert (good.closed, world.closed) == (1, 1)


def test_a_task_that_cannot_be_probed_is_left_out(bench: Bench) -> None:
    def reset(seed: int, episode_id: str) -> str:
        return raises() if seed == 13 else f"task {seed}"

    async def body() -> list[tuple[int, ...]]:
        bench.build(World(reset=reset), answers)
        return await probe_prompts(bench.rollout, 10)

    assert len(set(asyncio.run(body()))) == 7


@pytest.mark.parametrize(
    ("world", "to_do"),
    [
        (World(reset=lambda seed, episode_id: raises()), "mend the environment"),
        (World(reset=lambda seed, episode_id: "x" * 300), "raise engine.max_model_len"),
    ],
)
def test_an_environment_that_begins_no_task_is_told_what_a_probe_is(bench: Bench, world: World, to_do: str) -> None:
    async def body() -> None:
        bench.build(world, answers)
        await probe_prompts(bench.rollout, 10)

    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(body())
    said = str(caught.value)
    assert said.startswith("environment: it began none of the first 8 held-out tasks (seeds from 10)")
    assert "before anything is played, as episodes probe-0 to probe-7" in said
    assert "The last failure: environment probe-7: " in said
    assert to_do in said
