"""Plays the tasks of `kv` against a real engine: as vLLM takes them, or as the scheduler says.

Invariant
- Whatever the order, the same tasks are played to their end, with as many tokens each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.kv_site import KvSite
from bench.kv_tasks import Task
from bench.registry import BenchFailed
from rose.trainer.left_behind import LeftBehind
from rose_executor.keep_prefix import Keep
from rose_scheduler.client import Turn

_WAIT_S = 600.0
_KEEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Played:
    """`tok_s` are answers' tokens per second, `hit_rate` the share of prompt tokens that were in the cache."""

    seconds: float
    tok_s: float
    hit_rate: float
    preempted: float


class Order(Protocol):
    """Says when a turn is sent."""

    async def turn(self, site: KvSite, task: Task, number: int, context: list[int]) -> Sequence[int]:
        """The answer to a turn."""
        ...

    async def over(self, site: KvSite, task: Task) -> None:
        """A task takes no more turns."""
        ...


class FirstCome:
    """vLLM's default: at once."""

    async def turn(self, site: KvSite, task: Task, number: int, context: list[int]) -> Sequence[int]:
        return await _answer(site, task, number, context, None)

    async def over(self, site: KvSite, task: Task) -> None:
        pass


class Batched:
    """When the scheduler grants it; the engine is told whose prefix to keep."""

    def __init__(self) -> None:
        self._left_behind = LeftBehind()

    async def turn(self, site: KvSite, task: Task, number: int, context: list[int]) -> Sequence[int]:
        asked = Turn(task.trajectory_id, task.group_id, number, len(context), group_size=task.group_size)
        async with site.scheduler.lease(asked, wait_s=_WAIT_S, hold_s=_WAIT_S) as lease:
            last = number + 1 == len(task.turns)
            name = "" if last else task.trajectory_id
            forget = self._left_behind.on(lease.incarnation, name)
            answer = await _answer(site, task, number, context, Keep(name, lease.keep_rank, _KEEP_S, forget))
            lease.tokens = len(answer)
        return answer

    async def over(self, site: KvSite, task: Task) -> None:
        self._left_behind.over(task.trajectory_id)
        await site.scheduler.over(task.trajectory_id)


async def play(site: KvSite, tasks: Sequence[Task], open_max: int, order: Order) -> Played:
    """All tasks, of which `open_max` are open at once. Raises BenchFailed."""
    before, began_s = await site.cache(), time.monotonic()
    slots = asyncio.Semaphore(open_max)
    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(_play(site, task, slots, order)) for task in tasks]
    seconds, after = time.monotonic() - began_s, await site.cache()
    tokens = sum(one.result() for one in playing)
    hit_rate = (after.found - before.found) / (after.asked - before.asked)
    return Played(seconds, tokens / seconds, hit_rate, after.preempted - before.preempted)


async def _play(site: KvSite, task: Task, slots: asyncio.Semaphore, order: Order) -> int:
    async with slots:
        context: list[int] = []
        tokens = 0
        for number, turn in enumerate(task.turns):
            await asyncio.sleep(turn.tool_s)
            context += turn.said
            answer = await order.turn(site, task, number, context)
            context += answer
            tokens += len(answer)
        await order.over(site, task)
        return tokens


async def _answer(site: KvSite, task: Task, number: int, context: list[int], keep: Keep | None) -> Sequence[int]:
    wanted = task.turns[number].answer_tokens
    output = await site.route.generate(
        f"{task.trajectory_id}.{number}", context, max_tokens=wanted, temperature=0.0, stop_token_ids=(), keep=keep
    )
    if len(output.output_ids) != wanted:
        raise BenchFailed(f"{task.trajectory_id} got {len(output.output_ids)} tokens, not {wanted}: {output.finish}")
    return output.output_ids
