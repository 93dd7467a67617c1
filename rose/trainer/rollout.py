"""Drives trajectories: observe, sample, act, until the task ends.

Invariants
- A task that was started comes back as exactly one trajectory, whatever its environment or engine did; failures are
  outcomes with a cause. Only cancellation and the lack of any engine pass through.
- A context is only ever appended to. Where the rendered prefix does not extend it, a new segment begins and says so.
- Trajectories that cannot be trained are settled here; the others stay in flight until the update decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.env.chat import ChatRenderer, Conversation, Delta, Message
from rose.env.episodes import Episodes, OpenEpisode
from rose.errors import EngineError, EnvironmentFailed, RoseError, SchedulerError
from rose.ledger import Account
from rose.logs import bound, logger
from rose.records import Outcome, Purpose, Trajectory, Turn
from rose.trainer.books import Books
from rose.trainer.sampler import TurnSampler
from rose_scheduler.client import Turn as LeasedTurn

log = logger("rollout")

_CHARACTERS_PER_TOKEN_MAX = 128
"""More than any vocabulary's tokens average over a text."""

_FAILURE_CHARACTERS_MAX = 1000
"""An environment may put a whole page into what it raises; every log line and report would carry it."""

_ACCOUNT_OF = {
    Outcome.TRUNCATED: Account.TRUNCATED,
    Outcome.ENVIRONMENT_FAILED: Account.ENVIRONMENT_FAILED,
    Outcome.ABORTED: Account.ABORTED,
}


@dataclass(frozen=True, slots=True)
class Task:
    """One attempt to make: tasks of one group, of `group_size`, share their seed; those of an evaluation need not.

    It is sampled under `min_version` or newer. `keep_messages` keeps its words for `take_messages`.
    """

    trajectory_id: str
    group_id: str
    seed: int
    purpose: Purpose
    min_version: int
    group_size: int
    keep_messages: bool = False


@dataclass(slots=True)
class _Draft:
    """A trajectory under way; `context` is what the model sees next."""

    context: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False
    malformed_actions: int = 0
    outcome: Outcome = Outcome.COMPLETED
    failure: str = ""
    failed_at: str = ""

    def fail(self, outcome: Outcome, error: RoseError) -> None:
        self.outcome, self.failed_at = outcome, error.boundary
        self.failure = str(error)[:_FAILURE_CHARACTERS_MAX]

    def finish(self, task: Task) -> Trajectory:
        return Trajectory(
            trajectory_id=task.trajectory_id,
            group_id=task.group_id,
            task_seed=task.seed,
            purpose=task.purpose,
            turns=tuple(self.turns),
            reward=self.reward,
            success=self.success,
            outcome=self.outcome,
            malformed_actions=self.malformed_actions,
            failure=self.failure,
            failed_at=self.failed_at,
        )


class Rollout:
    """Runs tasks side by side, at most `concurrency` at once.

    `context_tokens_max` bounds prompt and output of one turn together: the engine's context length.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        episodes: Episodes,
        renderer: ChatRenderer,
        books: Books,
        *,
        context_tokens_max: int,
        turns_max: int,
        concurrency: int,
    ) -> None:
        self._sampler = sampler
        self._episodes = episodes
        self._renderer = renderer
        self._books = books
        self._context_tokens_max = context_tokens_max
        self._turns_max = turns_max
        self._slots = asyncio.Semaphore(concurrency)
        self._messages: dict[str, Conversation] = {}

    async def run(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """One trajectory per task, in the order of `tasks`."""
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._one(task)) for task in tasks]
        trajectories = [each.result() for each in running]
        early = [trajectory for trajectory in trajectories if trajectory.outcome is not Outcome.COMPLETED]
        if early:
            log.warning("episodes ended early", episodes=len(early), of=len(trajectories), first=early[0].failure)
        return trajectories

    async def first_prompt(self, seed: int, episode_id: str) -> tuple[int, ...]:
        """What the model would be asked first in a task, which is not played.

        Raises EnvironmentFailed if the environment fails, or says more than the context holds.
        """
        episode = await self._episodes.open(seed, episode_id)
        draft = _Draft()
        try:
            self._extend(draft, self._open(episode)[1])
        except _ContextFull as full:
            to_do = "raise engine.max_model_len, or let the environment say less"
            raise EnvironmentFailed(f"environment {episode_id}: {full.what}", to_do=to_do) from full
        finally:
            await episode.close()
        return tuple(draft.context)

    def take_messages(self, trajectory_id: str) -> tuple[Message, ...]:
        """The messages of a task that asked to keep them, once; empty if it never began."""
        conversation = self._messages.pop(trajectory_id, None)
        return conversation.messages if conversation is not None else ()

    async def _one(self, task: Task) -> Trajectory:
        async with self._slots:
            with bound(trajectory_id=task.trajectory_id, group_id=task.group_id):
                self._books.open_trajectory(task.trajectory_id)
                draft = _Draft()
                try:
                    await self._play(task, draft)
                except EnvironmentFailed as error:
                    draft.fail(Outcome.ENVIRONMENT_FAILED, error)
                except (EngineError, SchedulerError) as error:
                    draft.fail(Outcome.ABORTED, error)
                log.info(
                    "trajectory ended",
                    outcome=draft.outcome.value,
                    reward=draft.reward,
                    success=draft.success,
                    turns=len(draft.turns),
                    tokens=sum(len(turn.output_ids) for turn in draft.turns),
                    why=draft.failure,
                )
                await self._sampler.over(task.trajectory_id)
                self._settle(task, draft)
                return draft.finish(task)

    def _settle(self, task: Task, draft: _Draft) -> None:
        if task.purpose is Purpose.EVALUATION:
            self._books.settle(task.trajectory_id, Account.EVALUATION)
        elif draft.outcome is not Outcome.COMPLETED:
            self._books.settle(task.trajectory_id, _ACCOUNT_OF[draft.outcome])

    async def _play(self, task: Task, draft: _Draft) -> None:
        episode = await self._episodes.open(task.seed, task.trajectory_id)
        try:
            conversation, delta = self._open(episode)
            if task.keep_messages:
                self._messages[task.trajectory_id] = conversation
            for index in range(self._turns_max):
                self._extend(draft, delta)
                action = await self._turn(task, draft, index, conversation, delta)
                result = await episode.step(action)
                draft.reward += result.reward
                draft.success = draft.success or result.success
                draft.malformed_actions += result.malformed
                if result.over or index + 1 == self._turns_max:
                    return
                self._check_length(result.observation)
                delta = conversation.observe(result.observation)
        except _ContextFull as full:
            draft.fail(Outcome.TRUNCATED, full)
        finally:
            await episode.close()

    def _open(self, episode: OpenEpisode) -> tuple[Conversation, Delta]:
        self._check_length(episode.system_prompt)
        self._check_length(episode.first_observation)
        return self._renderer.open(episode.system_prompt, episode.first_observation)

    def _check_length(self, text: str) -> None:
        # Before encoding: a megabyte of text must not hold up every other trajectory.
        if len(text) > _CHARACTERS_PER_TOKEN_MAX * self._context_tokens_max:
            raise _ContextFull(f"the environment said {len(text)} characters, more than any context holds")

    def _extend(self, draft: _Draft, delta: Delta) -> None:
        context = list(delta.ids) if delta.starts_segment else [*draft.context, *delta.ids]
        needed = len(context) + self._sampler.settings.max_new_tokens
        if needed > self._context_tokens_max:
            raise _ContextFull(f"the next turn needs {needed} tokens, the context holds {self._context_tokens_max}")
        draft.context = context

    async def _turn(self, task: Task, draft: _Draft, index: int, conversation: Conversation, delta: Delta) -> str:
        asked = LeasedTurn(
            task.trajectory_id,
            task.group_id,
            index,
            len(draft.context),
            task.min_version,
            group_size=task.group_size,
            evaluation=task.purpose is Purpose.EVALUATION,
        )
        last = index + 1 == self._turns_max
        sampled = await self._sampler.sample(asked, draft.context, last=last)
        draft.context.extend(sampled.output_ids)
        draft.turns.append(
            Turn(
                context_ids=delta.ids,
                output_ids=tuple(sampled.output_ids),
                logprobs=tuple(sampled.logprobs),
                versions=tuple(sampled.versions),
                finish=sampled.finish,
                starts_segment=delta.starts_segment,
                requests=tuple(sampled.requests),
            )
        )
        return conversation.answer(sampled.output_ids)


def why_none_completed(trajectories: Sequence[Trajectory]) -> EngineError | SchedulerError | EnvironmentFailed | None:
    """By what most of them ended, if not a single trajectory came to its end; else None."""
    outcomes = Counter(trajectory.outcome for trajectory in trajectories)
    if outcomes[Outcome.COMPLETED]:
        return None
    ((outcome, count),) = outcomes.most_common(1)
    first = next(trajectory for trajectory in trajectories if trajectory.outcome is outcome)
    what = f"not one of {len(trajectories)} trajectories came to its end; {count} are {outcome}, the first: "
    what += first.failure
    match outcome:
        case Outcome.ABORTED if first.failed_at == SchedulerError.boundary:
            return SchedulerError(what, to_do="see the scheduler's log")
        case Outcome.ABORTED:
            return EngineError(what, to_do="see the engine's log")
        case Outcome.TRUNCATED:
            return EnvironmentFailed(what, to_do="raise engine.max_model_len, or let the environment say less")
        case _:
            return EnvironmentFailed(what, to_do="mend the environment, or raise its deadlines")


class _ContextFull(RoseError):
    """The episode needs more tokens than the engine's context holds."""

    boundary = EnvironmentFailed.boundary
