"""The tasks of `kv`: multi-turn, in groups, with tool latencies; drawn once for a seed, whatever runs them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

TOKEN_IDS = range(5, 384)
CONTEXT_TOKENS = 1000
"""No task grows beyond that."""


@dataclass(frozen=True, slots=True)
class TaskTurn:
    """`said` is what the environment says before it, after `tool_s` seconds; the answer has `answer_tokens`."""

    said: tuple[int, ...]
    answer_tokens: int
    tool_s: float


@dataclass(frozen=True)
class Task:
    trajectory_id: str
    group_id: str
    group_size: int
    turns: tuple[TaskTurn, ...]

    @cached_property
    def context_tokens(self) -> int:
        """At its end."""
        return sum(len(turn.said) + turn.answer_tokens for turn in self.turns)

    @cached_property
    def mean_context_tokens(self) -> float:
        """Over its turns, each at its end."""
        total = length = 0
        for turn in self.turns:
            length += len(turn.said) + turn.answer_tokens
            total += length
        return total / len(self.turns)


@dataclass(frozen=True, slots=True)
class Mix:
    """What tasks are like: ranges, and means and spreads (sigma) of log-normal draws."""

    groups: int = 24
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (96, 256)
    turns: tuple[int, int] = (2, 14)
    said_tokens: float = 32.0
    answer_tokens: float = 24.0
    tool_s: float = 0.3
    spread: float = 0.6


MIXES: Mapping[str, Mix] = {
    "steady": Mix(groups=36),
    "uneven": Mix(groups=36, spread=1.2),
    "slow-tools": Mix(groups=36, tool_s=1.5),
}
"""Tools as long as answers take; the same with some that are far longer than others; and tools that take most of it."""


def tasks_of(mix: Mix, seed: int) -> list[Task]:
    """Tasks of one group share the first thing that their environment says, and nothing else."""
    tasks = []
    for group in range(mix.groups):
        shared = random.Random(f"{seed}.{group}")
        prompt = tuple(shared.choices(TOKEN_IDS, k=shared.randint(*mix.prompt_tokens)))
        for member in range(mix.group_size):
            source = random.Random(f"{seed}.{group}.{member}")
            turns: list[TaskTurn] = []
            context = 0
            for number in range(source.randint(*mix.turns)):
                said = tuple(source.choices(TOKEN_IDS, k=_drawn(source, mix.said_tokens, mix.spread)))
                said, tool_s = (said, _log_normal(source, mix.tool_s, mix.spread)) if number else (prompt, 0.0)
                turn = TaskTurn(said, _drawn(source, mix.answer_tokens, mix.spread), tool_s)
                context += len(turn.said) + turn.answer_tokens
                if context > CONTEXT_TOKENS:
                    break
                turns.append(turn)
            tasks.append(Task(f"g{group}.{member}", f"g{group}", mix.group_size, tuple(turns)))
    return tasks


def working_set_tokens(tasks: Sequence[Task]) -> float:
    """KV memory that all tasks would hold if all were open at once."""
    return sum(task.mean_context_tokens for task in tasks)


def findable_share(tasks: Sequence[Task], block_tokens: int) -> float:
    """Of all prompt tokens, those that were computed before in the same trajectory, or as its group's first prompt."""
    asked = found = 0
    seen_groups: set[str] = set()
    for task in tasks:
        context = 0
        for number, turn in enumerate(task.turns):
            before = context
            context += len(turn.said)
            asked += context
            if number == 0 and task.group_id in seen_groups:
                before = context - 1
            found += before // block_tokens * block_tokens
            context += turn.answer_tokens
        seen_groups.add(task.group_id)
    return found / asked


def _log_normal(source: random.Random, mean: float, spread: float) -> float:
    return mean * source.lognormvariate(-spread * spread / 2, spread)


def _drawn(source: random.Random, mean: float, spread: float) -> int:
    return max(2, round(_log_normal(source, mean, spread)))
