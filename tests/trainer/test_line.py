"""Calls that share messages: few of them, no answer late for another's sake, and every call ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.errors import ClusterError, EnvironmentFailed
from rose.trainer import line
from rose.trainer.line import Answering, Line


class Kitchen:
    """Answers when its door is opened, or at once."""

    def __init__(self) -> None:
        self.door = asyncio.Event()
        self.seen: list[str] = []

    async def quick(self, name: str) -> str:
        self.seen.append(name)
        return name

    async def slow(self, name: str) -> str:
        await self.door.wait()
        return name

    async def fail(self, error: Exception) -> None:
        raise error


class NearRank:
    """A rank whose object is here: counts messages, and can die."""

    def __init__(self, far: Answering) -> None:
        self.death: ClusterError | None = None
        self.messages: list[str] = []
        self._far = far
        self._death = asyncio.Event()
        self._posted: set[asyncio.Future[Any]] = set()

    def post(self, method: str, *arguments: Any) -> None:
        self.messages.append(method)
        self._posted.add(asyncio.ensure_future(getattr(self._far, method)(*arguments)))

    async def call(self, method: str, *arguments: Any, what: str, timeout_s: float) -> Any:
        self.messages.append(method)
        death = asyncio.ensure_future(self._death.wait())
        answer = asyncio.ensure_future(getattr(self._far, method)(*arguments))
        try:
            await asyncio.wait([death, answer], return_when=asyncio.FIRST_COMPLETED)
            if self.death is not None:
                raise self.death
            return await answer
        finally:
            death.cancel()
            answer.cancel()

    def die(self) -> None:
        self.death = ClusterError("it is dead")
        self._death.set()


class Site:
    def __init__(self) -> None:
        self.kitchen = Kitchen()
        self.rank = NearRank(Answering(self.kitchen))
        self.line = Line(self.rank, 60.0)  # type: ignore[arg-type]


def test_calls_of_one_moment_share_messages_and_begin_in_order() -> None:
    async def play() -> None:
        site = Site()
        names = [f"n{index}" for index in range(50)]
        assert await asyncio.gather(*(site.line.call("quick", name) for name in names)) == names
        assert site.kitchen.seen == names
        assert site.rank.messages.count("take") == 1
        assert site.rank.messages.count("answers") <= 3

    asyncio.run(play())


def test_no_answer_waits_for_another() -> None:
    async def play() -> None:
        site = Site()
        slow, quick = (asyncio.ensure_future(site.line.call(*call)) for call in (("slow", "late"), ("quick", "early")))
        async with asyncio.timeout(20):
            assert await quick == "early"
        await asyncio.sleep(0.05)
        assert not slow.done()
        assert site.rank.messages == ["take", "answers", "answers"]
        site.kitchen.door.set()
        assert await slow == "late"

    asyncio.run(play())


def test_answers_are_asked_for_again_and_again_while_one_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "HOLD_S", 0.01)

    async def play() -> None:
        site = Site()
        slow = asyncio.ensure_future(site.line.call("slow", "late"))
        while site.rank.messages.count("answers") < 3:
            await asyncio.sleep(0.005)
        site.kitchen.door.set()
        assert await slow == "late"
        await asyncio.sleep(0.05)
        asked = site.rank.messages.count("answers")
        await asyncio.sleep(0.05)
        assert site.rank.messages.count("answers") == asked

    asyncio.run(play())


def test_errors_are_of_their_call_alone() -> None:
    async def play() -> None:
        site = Site()
        ours, foreign, well = await asyncio.gather(
            site.line.call("fail", EnvironmentFailed("the lake is dry")),
            site.line.call("fail", ZeroDivisionError("by what")),
            site.line.call("quick", "well"),
            return_exceptions=True,
        )
        assert (type(ours), str(ours)) == (EnvironmentFailed, "environment: the lake is dry")
        assert isinstance(foreign, ClusterError)
        assert "fail: ZeroDivisionError: by what" in str(foreign)
        assert well == "well"

    asyncio.run(play())


def test_a_dead_rank_ends_every_call_and_gets_no_more() -> None:
    async def play() -> None:
        site = Site()
        calls = [asyncio.ensure_future(site.line.call("slow", name)) for name in "ab"]
        await asyncio.sleep(0.01)
        site.rank.die()
        for call in calls:
            with pytest.raises(ClusterError, match="it is dead"):
                await call
        sent = len(site.rank.messages)
        site.line.post("quick", "c")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(site.rank.messages) == sent

    asyncio.run(play())


def test_a_call_that_is_given_up_leaves_the_others_alone() -> None:
    async def play() -> None:
        site = Site()
        calls = [asyncio.ensure_future(site.line.call("slow", name)) for name in "ab"]
        await asyncio.sleep(0.01)
        calls[0].cancel()
        site.kitchen.door.set()
        assert await calls[1] == "b"
        assert calls[0].cancelled()
        await site.line.close()

    asyncio.run(play())
