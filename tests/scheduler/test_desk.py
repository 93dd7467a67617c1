"""The driver of the core: who is told what, also where calls break off in the moment of their answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from rose.metrics import SchedulerMetrics
from rose.waits import WaitBoard
from rose_scheduler.desk import Desk
from rose_scheduler.events import (
    EngineBeat,
    EngineKind,
    EngineOffered,
    Expire,
    Grant,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    Reason,
    Refuse,
)
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement


def with_desk(body: Callable[[Desk], Awaitable[None]], metrics: SchedulerMetrics | None = None) -> None:
    async def check() -> None:
        core = Placement(Limits(beat_deadline_s=600.0, dead_after_s=900.0))
        desk = Desk(core, WaitBoard(), metrics or SchedulerMetrics())
        await body(desk)
        assert desk._askers == {}
        desk.close()

    asyncio.run(check())


def join(desk: Desk) -> None:
    desk.engine(EngineOffered("e", "1", EngineKind.LENT, "at-e", 1, 0))
    desk.engine(EngineBeat("e", "1", 0, 1, 0.0))


def asked(lease_id: str, *, trajectory: str = "t", wait_s: float = 60.0) -> LeaseAsked:
    return LeaseAsked(lease_id, trajectory, "g", 1, 10, 0, time.monotonic() + wait_s, 60.0, f"token {lease_id}")


def tokens(metrics: SchedulerMetrics) -> float | None:
    return metrics.registry.get_sample_value("rose_scheduler_tokens_total")


async def begun(desk: Desk, event: LeaseAsked) -> asyncio.Task[Grant | Refuse | Expire]:
    task = asyncio.create_task(desk.ask(event))
    await asyncio.sleep(0)
    return task


def test_a_call_that_breaks_off_in_the_moment_of_its_grant_gives_the_place_back() -> None:
    async def body(desk: Desk) -> None:
        first = await begun(desk, asked("a"))
        second = await begun(desk, asked("b", trajectory="u"))
        join(desk)
        first.cancel()  # it is granted, and has not heard so
        with pytest.raises(asyncio.CancelledError):
            await first
        answer = await second
        assert isinstance(answer, Grant)
        assert [sorted(engine.leases) for engine in desk.core.engines] == [["b"]]

    with_desk(body)


def test_a_call_that_was_superseded_takes_nothing_away_when_it_breaks_off() -> None:
    async def body(desk: Desk) -> None:
        first = await begun(desk, asked("a"))
        second = await begun(desk, asked("a"))
        first.cancel()  # it has not heard yet that it was superseded
        with pytest.raises(asyncio.CancelledError):
            await first
        assert len(desk.core.line) == 1
        join(desk)
        assert isinstance(await second, Grant)

    with_desk(body)


def test_the_last_of_several_calls_is_told_and_the_others_that_they_were_superseded() -> None:
    async def body(desk: Desk) -> None:
        calls = [await begun(desk, asked("a")) for _ in range(3)]
        join(desk)
        answers = await asyncio.gather(*calls)
        assert [one.reason for one in answers if isinstance(one, Refuse)] == [Reason.SUPERSEDED, Reason.SUPERSEDED]
        assert isinstance(answers[-1], Grant)

    with_desk(body)


def test_who_waits_when_it_closes_is_told_to_ask_again_later() -> None:
    async def body(desk: Desk) -> None:
        waiting = await begun(desk, asked("a"))
        desk.close()
        for answer in (await waiting, await desk.ask(asked("b"))):
            assert isinstance(answer, Refuse)
            assert (answer.reason, answer.retry_after_s) == (Reason.CLOSING, 1.0)

    with_desk(body)


def test_nobody_waits_longer_than_the_deadline() -> None:
    async def body(desk: Desk) -> None:
        calls = [await begun(desk, asked(f"{number}", wait_s=0.02 * number)) for number in range(4)]
        answers = await asyncio.gather(*calls)
        assert all(isinstance(one, Expire) for one in answers)
        assert len(desk.core.leases) == 0

    with_desk(body)


def test_an_end_books_its_tokens_once() -> None:
    metrics = SchedulerMetrics()

    async def body(desk: Desk) -> None:
        join(desk)
        await desk.ask(asked("a"))
        for _ in range(2):
            desk.end(LeaseEnded("a", LeaseOutcome.DONE, 9))

    with_desk(body, metrics)
    assert tokens(metrics) == 9


def test_context_that_a_turn_leaves_behind_is_counted() -> None:
    metrics = SchedulerMetrics()

    async def body(desk: Desk) -> None:
        join(desk)
        for number, outcome in enumerate((LeaseOutcome.DONE, LeaseOutcome.CUT, LeaseOutcome.DONE)):
            await desk.ask(replace(asked(f"{number}"), turn=number))
            desk.end(LeaseEnded(f"{number}", outcome, 9))

    with_desk(body, metrics)
    assert metrics.registry.get_sample_value("rose_scheduler_moved_context_tokens_total") == 10
