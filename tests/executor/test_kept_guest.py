"""What ending and waking a guest does to what is lent of it: over a life that does as the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose_executor import kept_guest
from rose_executor.kept_guest import KeptGuest


class World:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.answers: list[tuple[int, ...] | EngineError] = []
        self.late = False
        self.waits = WaitBoard()
        route = SimpleNamespace(generate=self._generate)
        self.finished = self.tokens = 1
        live = SimpleNamespace(
            incarnation="a1",
            engine_id="lent",
            waits=self.waits,
            route=route,
            request_tokens=lambda request_id: self.tokens,
            finished=self._finished,
        )
        self.life: Any = SimpleNamespace(leave=self._leave, live=live, proven=True)
        shelf: Any = SimpleNamespace(set_more_apart=lambda incarnation, tokens: self.told.append(f"apart {tokens}"))
        supervisor: Any = SimpleNamespace(hold_down=self._hold_down, let_up=None)
        process: Any = SimpleNamespace(alive=False)
        self.guest = KeptGuest(process, supervisor, shelf, lambda: self.life)

    async def _leave(self, why: str) -> None:
        self.told.append(f"leave: {why}")
        if self.late:
            raise DeadlineExceeded("withdrawal", boundary="scheduler")

    async def _hold_down(self) -> None:
        self.told.append("hold down")

    async def _finished(self, request_id: str) -> None:
        if not self.finished:
            raise DeadlineExceeded("final count", boundary="engine")

    async def _generate(self, request_id: str, prompt: list[int], **more: Any) -> Any:
        self.told.append(request_id)
        answer = self.answers.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return SimpleNamespace(output_ids=answer)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_lent_is_taken_back_before_the_end_which_nobody_holds_up(late: bool) -> None:
    world = World()
    world.late = late
    asyncio.run(world.guest.end("no room"))
    assert world.told == ["leave: no room", "hold down"]


def test_one_without_a_life_is_just_ended() -> None:
    world = World()
    world.life = None
    asyncio.run(world.guest.end("no room"))
    assert world.told == ["hold down"]
    assert world.guest.pid is None


def test_it_is_asked_until_a_token_comes_and_each_is_set_apart() -> None:
    world = World()
    world.answers = [(), (7,)]
    assert asyncio.run(world.guest.computes())
    assert world.told == ["woken-a1-1", "apart 1", "woken-a1-2", "apart 1"]


@pytest.mark.parametrize("answers", ["nothing", "empty answers"])
def test_one_that_computes_nothing_is_waited_for_by_name_and_not_for_ever(
    answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_guest, "_TOKEN_S", 0.3)
    monkeypatch.setattr(kept_guest, "_AGAIN_S", 0.01)
    world = World()
    seen: list[tuple[str, str]] = []

    async def generate(request_id: str, prompt: list[int], **more: Any) -> Any:
        seen.extend((wait.what, wait.whom) for wait in world.waits.snapshot())
        if answers == "nothing":
            await asyncio.Event().wait()
        return SimpleNamespace(output_ids=())

    world.life.live.route.generate = generate
    with pytest.raises(DeadlineExceeded, match="lent: no token after waking"):
        asyncio.run(world.guest.computes())
    assert set(seen) == {("token after waking", "lent")}
    assert world.told.count("apart 1") == len(seen)  # the last one's, too


def test_what_it_generated_is_set_apart_also_when_it_is_lost() -> None:
    world = World()
    world.answers = [EngineError("lost")]
    with pytest.raises(EngineError):
        asyncio.run(world.guest.computes())
    assert world.told == ["woken-a1-1", "apart 1"]


def test_one_that_is_not_proven_yet_is_not_asked() -> None:
    world = World()
    world.life.proven = False
    assert not asyncio.run(world.guest.computes())
    assert world.told == []


@pytest.mark.parametrize("given_up", [False, True])
def test_a_token_of_the_step_under_way_is_set_apart_too_when_nobody_waits_for_the_answer_any_more(
    given_up: bool,
) -> None:
    world = World()

    async def body() -> None:
        asked, asks_count, steps = asyncio.Event(), asyncio.Event(), asyncio.Event()
        world.tokens = 0

        async def generate(request_id: str, prompt: list[int], **more: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        async def finished(request_id: str) -> None:
            asks_count.set()
            await steps.wait()

        world.life.live.route.generate, world.life.live.finished = generate, finished
        asking = asyncio.create_task(world.guest.computes())
        await asked.wait()
        asking.cancel()
        await asks_count.wait()
        assert world.told == []
        world.tokens = 1
        if given_up:
            asking.cancel()  # nor for its end
        else:
            steps.set()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()

    asyncio.run(body())
    assert world.told == ["apart 1"]


def test_one_that_finishes_nothing_is_ended_by_nobody_and_what_it_has_is_set_apart() -> None:
    world = World()
    world.answers, world.finished = [EngineError("lost")], 0
    with pytest.raises(EngineError, match="lost"):
        asyncio.run(world.guest.computes())
    assert world.told == ["woken-a1-1", "apart 1"]
