"""One incarnation of a guest, with everything around it scripted: when it is offered, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from rose.errors import ClusterError, ContractError, EngineError, SchedulerError, TransferError
from rose.waits import WaitBoard
from rose_executor.control_client import Committed, EngineDescription
from rose_executor.guest_life import GuestLife
from rose_executor.guest_proof import WrongAnswer
from rose_executor.lender import GuestNow, GuestOffer
from rose_executor.lending import Room
from rose_executor.supervisor import LiveEngine
from rose_executor.version_follower import Followed
from rose_transfer.distribution import Fetched, Offer
from rose_transfer.transport.interface import Refused

LONG_S = 30.0


def in_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own, for a while at most."""

    @wraps(test)
    def run(**given: object) -> None:
        asyncio.run(asyncio.wait_for(test(**given), LONG_S))

    return run


class Upstream:
    """Offers the newest version; `fetch` fails with what is in `trouble`."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self.changed = asyncio.Event()
        self.trouble: list[Exception] = []
        self.refuses: Exception | None = None
        self.received_bytes = 0
        self.open = 0

    async def subscribe(self, after: Offer | None = None) -> AsyncIterator[Offer]:
        while self.newest is None or (after is not None and self.newest == after.version):
            self.changed.clear()
            await self.changed.wait()
        yield Offer(self.newest, f"bits of {self.newest}")

    def publish(self, version: int) -> None:
        self.newest = version
        self.changed.set()

    async def fetch(self, start: int | None, start_fingerprint: str | None, goal: int, *, deadline_s: float) -> Fetched:
        self.received_bytes += 100
        if self.trouble:
            raise self.trouble.pop(0)
        return Fetched(goal, f"bits of {goal}", Path("objects"), (("key", False),), True, 10)

    def forget(self) -> None:
        pass

    @asynccontextmanager
    async def receiving(self, control: object) -> AsyncIterator[Any]:
        if self.refuses is not None:
            raise self.refuses
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1


class Scheduler:
    """Takes what is offered until it `raises`; notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | int]] = []
        self.offered = asyncio.Event()
        self.raises: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self.now: Callable[[], GuestNow] | None = None
        self.trouble = ""

    async def keep_offered(self, guest: GuestOffer, now: Callable[[], GuestNow]) -> NoReturn:
        self.told.append((guest.incarnation, guest.weight_version))
        self.now = now
        self.offered.set()
        return await self.raises

    async def withdraw(self, guest: GuestOffer, why: str) -> None:
        await asyncio.sleep(0)  # as a call over the network
        self.told.append((guest.incarnation, why))


class World:
    def __init__(self) -> None:
        self.upstream, self.scheduler, self.waits = Upstream(), Scheduler(), WaitBoard()
        self.page = SimpleNamespace(version=0, kv_tokens=1000, token_s=0.25)
        self.room = Room(7, 0.5, 0.3)
        self.dead = asyncio.Event()
        self.killed: list[str] = []
        self.followed: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.proof: asyncio.Future[None] | None = None
        control: Any = SimpleNamespace(apply=self._apply, describe=self._describe)
        live = LiveEngine(
            engine_id="lent",
            incarnation="a1",
            base_url="http://here",
            route=None,  # type: ignore[arg-type]
            control=control,
            page=self.page,  # type: ignore[arg-type]
            dead=self.dead,
            waits=self.waits,
            kill=self._kill,
        )
        self.life = GuestLife(
            live,
            self.upstream.receiving,
            self.scheduler,
            self.waits,
            publisher="publisher there",
            counts_address="counts",
            max_requests=16,
            prove=self._prove,
            now=lambda: self.room,
            told=self._followed,
        )
        self.running = asyncio.create_task(self.life.run())

    async def offered(self, version: int) -> None:
        self.upstream.publish(version)
        await self.scheduler.offered.wait()

    async def settled(self) -> None:
        """Everything that can go on without news has gone on."""
        for _ in range(100):
            await asyncio.sleep(0)

    async def _apply(self, version: int, objects: Path, way: object, *, keep_kv: bool) -> Committed:
        self.page.version = version
        return Committed(2.0, 1.0)

    async def _describe(self) -> EngineDescription:
        return EngineDescription("lent", "a1", 1, 8000, 0, False, "", "0")

    async def _prove(self, live: object, receiver: object, runs: Offer) -> None:
        assert (live, receiver) == (self.life.live, self.upstream)
        assert runs.fingerprint == f"bits of {runs.version}"
        self.asked.append(runs.version)
        if self.proof is not None:
            await self.proof

    def _kill(self, why: str) -> None:
        self.killed.append(why)
        self.dead.set()

    def _followed(self, followed: Followed, fetched_bytes: int) -> None:
        self.followed.append((followed.version, fetched_bytes))


@in_loop
async def test_it_is_offered_with_its_first_version_and_withdrawn_with_its_death() -> None:
    world = World()
    await world.settled()
    assert world.scheduler.told == []
    assert [(wait.what, wait.whom) for wait in world.waits.snapshot()] == [
        ("a version to sample with", "publisher there")
    ]
    await world.offered(5)
    assert world.scheduler.told == [("a1", 5)]
    assert world.scheduler.now is not None
    assert world.scheduler.now() == GuestNow(5, 7, 0.5, 300, 0.25)
    world.upstream.publish(6)
    await world.settled()
    assert world.scheduler.now() == GuestNow(6, 7, 0.5, 300, 0.25)
    world.room = Room(7, 0.5, 0.0)
    assert world.scheduler.now().kv_tokens == 1  # next to nothing, and known
    assert world.life.followed is not None
    assert world.life.followed.version == 6
    world.dead.set()
    await world.running
    assert world.scheduler.told[1:] == [("a1", "the guest is dead")]
    assert world.upstream.open == 0
    assert world.waits.snapshot() == ()


@in_loop
async def test_it_is_proven_once_before_it_is_offered_and_stays_on_that_version_meanwhile() -> None:
    world = World()
    world.proof = asyncio.get_running_loop().create_future()
    world.upstream.publish(5)
    await world.settled()
    assert world.asked == [5]
    assert world.life.followed is not None
    world.upstream.publish(6)
    await world.settled()
    assert (world.page.version, world.scheduler.told) == (5, [])
    world.proof.set_result(None)
    await world.scheduler.offered.wait()
    await world.settled()
    assert world.page.version == 6
    assert world.asked == [5]
    world.running.cancel()


@in_loop
async def test_one_that_answers_wrongly_is_replaced_and_was_never_offered() -> None:
    world = World()
    world.proof = asyncio.get_running_loop().create_future()
    world.proof.set_exception(WrongAnswer("lent answers wrongly"))
    world.upstream.publish(5)
    await world.running
    assert world.killed == ["lent answers wrongly"]
    assert world.scheduler.told == []
    assert world.upstream.open == 0


@in_loop
async def test_what_no_other_guest_would_answer_better_is_raised() -> None:
    world = World()
    world.proof = asyncio.get_running_loop().create_future()
    world.proof.set_exception(ContractError("so did 3 guests in a row"))
    world.upstream.publish(5)
    with pytest.raises(ContractError, match="so did 3"):
        await world.running
    assert world.scheduler.told == []


@in_loop
async def test_one_that_dies_while_it_is_asked_is_not_killed_once_more() -> None:
    world = World()
    world.proof = asyncio.get_running_loop().create_future()
    world.upstream.publish(5)
    await world.settled()
    world.dead.set()
    await world.running
    assert world.killed == []
    assert world.scheduler.told == []


@in_loop
async def test_bytes_of_attempts_that_failed_count_too() -> None:
    world = World()
    world.upstream.trouble = [TransferError("a tile is damaged")]
    await world.offered(5)
    await world.offered(6)
    await world.settled()
    assert world.followed == [(5, 200), (6, 100)]
    world.running.cancel()


@in_loop
async def test_an_executor_that_ends_withdraws_it() -> None:
    world = World()
    await world.offered(5)
    world.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await world.running
    assert world.scheduler.told[1:] == [("a1", "the executor ends")]
    assert world.upstream.open == 0
    assert world.killed == []


@in_loop
async def test_what_the_scheduler_does_not_take_is_replaced() -> None:
    world = World()
    await world.offered(5)
    world.scheduler.raises.set_exception(EngineError("is not taken: over"))
    await world.running
    assert world.killed == ["is not taken: over"]
    assert world.scheduler.told[1:] == [("a1", "the guest is replaced")]


@in_loop
async def test_an_engine_that_takes_no_version_is_replaced_and_was_never_offered() -> None:
    world = World()
    world.upstream.trouble = [EngineError("the engine does not answer")]
    world.upstream.publish(5)
    await world.running
    assert world.killed == ["the engine does not answer"]
    assert world.scheduler.told == []


@in_loop
async def test_an_engine_that_is_dead_before_it_is_asked_anything_is_not_killed_once_more() -> None:
    world = World()
    world.upstream.refuses = EngineError("the engine does not answer")
    world.dead.set()
    await world.running
    assert world.killed == []


@pytest.mark.parametrize("error", [SchedulerError("the token is wrong"), ClusterError("anything else")])
@in_loop
async def test_what_no_other_guest_mends_is_raised(error: Exception) -> None:
    world = World()
    await world.offered(5)
    world.scheduler.raises.set_exception(error)
    with pytest.raises(type(error)):
        await world.running
    assert world.killed == []
    assert len(world.scheduler.told) == 2


@in_loop
async def test_a_publisher_that_refuses_is_raised() -> None:
    world = World()
    world.upstream.trouble = [Refused("the token is wrong")]
    world.upstream.publish(5)
    with pytest.raises(Refused):
        await world.running
    assert world.scheduler.told == []


@in_loop
async def test_one_that_leaves_is_withdrawn_before_it_is_ended_and_its_life_lasts_until_it_has() -> None:
    world = World()
    await world.offered(5)
    await world.life.leave("there is no room for it")
    assert world.scheduler.told == [("a1", 5), ("a1", "there is no room for it")]
    assert world.killed == []
    await world.settled()
    assert not world.running.done()
    world.dead.set()
    await world.running
    assert world.upstream.open == 0


@in_loop
async def test_one_that_was_never_offered_leaves_as_well() -> None:
    world = World()
    await world.settled()
    await world.life.leave("there is no room for it")
    world.dead.set()
    await world.running
    assert world.scheduler.told == []
