"""The guest is put to sleep, woken, ended and started, and that is measured: on a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import EngineError
from rose_executor.board_states import GuestState, ServingKv, ServingState
from rose_executor.guest_memory import HostMemory
from rose_executor.guest_presence import Move, Presence, Room
from rose_executor.guest_sleeper import GuestSleeper, room_for
from rose_executor.kv_budget import FixedBlocks, KvBudget, KvShare, MemoryFigures
from rose_executor.kv_policy import KvPolicy, KvPool

POOL = KvPool(pool_bytes=1000, serving_bytes=1000, guest_bytes=500)
NEED_BLOCKS = 10
"""Of the 50 that the guest has: 100 bytes."""


class Partner:
    """A guest that does what it is told, as soon as the test lets it."""

    def __init__(self, kv: KvShare) -> None:
        self.pid: int | None = 4711
        self.told: list[str] = []
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._kv = kv

    async def computes(self) -> bool:
        self.told.append("asked")
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.told.append("asked no more")
            raise

    async def end(self, why: str) -> None:
        assert self._kv.presence is Presence.GONE  # nothing is lent of it any more
        self.told.append(f"end: {why}")
        self.pid = None

    async def start(self) -> None:
        self.told.append("start")
        self.pid = 4712


class Scene:
    def __init__(self, keep_free_bytes: int = 0, kv: KvShare | None = None) -> None:
        self.now_s = 100.0
        self.kv = KvBudget(KvPolicy(POOL)) if kv is None else kv
        self.partner = Partner(self.kv)
        self.used_bytes = 0
        self.left_bytes = 10_000
        self.sleeper = GuestSleeper(
            self.kv, self.partner, NEED_BLOCKS, keep_free_bytes, lambda: self.left_bytes, now=lambda: self.now_s
        )

    @property
    def presence(self) -> Presence:
        assert self.kv.presence is self.sleeper.presence.state
        return self.kv.presence

    async def look(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            state = ServingState(kv_blocks_used=self.used_bytes, kv_blocks_total=1000)
            guest = GuestState(kv_blocks_total=50, kv_blocks_resident=5)
            self.kv.blocks(state, ServingKv(total_bytes=1000, resident_bytes=self.used_bytes), guest, self.now_s)
            await self.sleeper.look()
            await asyncio.sleep(0)

    async def asleep(self) -> None:
        self.used_bytes = 950
        await self.look(6.0)
        assert self.presence is Presence.ASLEEP

    async def awake(self) -> None:
        self.used_bytes = 0
        while self.presence is not Presence.ACTIVE:  # serving's peak is remembered for a while
            await self.look(1.0)


@pytest.fixture(autouse=True)
def holds(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the kernel says that the guest holds."""
    told = {"own": 300}
    monkeypatch.setattr(
        "rose_executor.guest_sleeper.host_memory", lambda pid: HostMemory(1, 2 * told["own"], told["own"])
    )
    return told


def in_loop(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(body)
    def run(**given: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await body(**given)

        asyncio.run(bounded())

    return run


@in_loop
async def test_it_sleeps_when_its_budget_is_gone_and_what_it_holds_is_measured_again_and_again(
    holds: dict[str, int],
) -> None:
    scene = Scene()
    await scene.look(10.0)
    assert (scene.presence, scene.sleeper.presence.residue_bytes) == (Presence.ACTIVE, None)
    await scene.asleep()
    await scene.look(1.0)
    assert scene.sleeper.presence.residue_bytes == 300
    holds["own"] = 200  # its pages are back
    await scene.look(1.0)
    assert scene.sleeper.presence.residue_bytes == 200
    assert scene.partner.told == []


@in_loop
async def test_it_is_awake_again_once_it_computes_and_that_is_what_waking_takes() -> None:
    scene = Scene()
    await scene.asleep()
    await scene.awake()
    assert scene.partner.told == ["asked"]
    await scene.look(2.0)
    assert scene.sleeper.presence.wake_s is None
    scene.partner.answer.set_result(True)
    await scene.look(0.5)
    assert scene.sleeper.presence.wake_s is not None
    assert 2.0 <= scene.sleeper.presence.wake_s <= 4.0


@pytest.mark.parametrize("answer", [False, EngineError("lost")])
def test_a_guest_that_cannot_be_asked_leaves_its_waking_unmeasured(answer: bool | EngineError) -> None:
    async def check() -> None:
        scene = Scene()
        await scene.asleep()
        await scene.awake()
        if isinstance(answer, bool):
            scene.partner.answer.set_result(answer)
        else:
            scene.partner.answer.set_exception(answer)
        await scene.look(2.0)
        assert scene.sleeper.presence.wake_s is None
        assert scene.presence is Presence.ACTIVE

    asyncio.run(check())


@in_loop
async def test_one_that_goes_to_sleep_before_it_answers_is_asked_no_more() -> None:
    scene = Scene()
    await scene.asleep()
    await scene.awake()
    await scene.asleep()
    assert scene.partner.told == ["asked", "asked no more"]


@in_loop
async def test_memory_that_must_stay_free_ends_a_guest_that_sleep_makes_too_little_of() -> None:
    scene = Scene(keep_free_bytes=1000)
    await scene.asleep()
    scene.left_bytes = 900
    await scene.look(6.0)
    assert scene.presence is Presence.GONE
    assert scene.partner.told == ["end: what it holds even asleep is more than there is room for"]
    scene.used_bytes = 0
    scene.left_bytes = 1399  # of what it held asleep and a request, a byte is missing
    await scene.look(200.0)
    assert scene.presence is Presence.GONE
    scene.left_bytes = 1400
    await scene.look(12.0)
    assert scene.presence is Presence.ACTIVE
    assert scene.partner.told[1:] == ["start"]
    scene.now_s += 7.0
    scene.sleeper.process("ready")
    assert scene.sleeper.presence.start_s == pytest.approx(7.5, abs=1.1)


@in_loop
async def test_memory_that_must_stay_free_puts_it_to_sleep_where_that_is_enough() -> None:
    scene = Scene(keep_free_bytes=1000)
    await scene.asleep()
    await scene.awake()
    scene.left_bytes = 1020  # with the 50 bytes of keys and values that it has: no request
    await scene.look(6.0)
    assert scene.presence is Presence.ASLEEP
    await scene.look(60.0)
    assert scene.presence is Presence.ASLEEP
    scene.left_bytes = 1100
    await scene.look(12.0)
    assert scene.presence is Presence.ACTIVE


@in_loop
async def test_beside_a_fixed_split_it_stays_active() -> None:
    scene = Scene(keep_free_bytes=1000, kv=FixedBlocks(50))
    scene.left_bytes = 0
    await scene.look(60.0)
    assert scene.presence is Presence.ACTIVE


@in_loop
async def test_nothing_is_done_with_a_guest_of_which_nobody_knows_how_large_it_is() -> None:
    scene = Scene()
    for _ in range(100):
        scene.now_s += 0.5
        await scene.sleeper.look()
    assert scene.presence is Presence.ACTIVE


@in_loop
async def test_a_guest_that_ends_while_it_is_measured_is_measured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scene = Scene()
    scene.partner.pid = psutil.pids()[-1] + 10**7
    await scene.asleep()
    await scene.look(5.0)
    assert scene.sleeper.presence.residue_bytes is None


@in_loop
async def test_running_it_ends_with_its_question() -> None:
    scene = Scene()
    await scene.asleep()
    await scene.awake()
    running = asyncio.create_task(scene.sleeper.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert scene.partner.told == ["asked", "asked no more"]


amounts = st.integers(0, 10_000)


@given(st.sampled_from(Presence), amounts, amounts, amounts, st.integers(-10_000, 10_000))
def test_room_is_what_it_holds_and_what_is_free(
    state: Presence, budget_bytes: int, kv_bytes: int, held_bytes: int, spare_bytes: int
) -> None:
    figures = MemoryFigures(budget_bytes, kv_bytes, False, 0, 0, 0, "", gives_back=True)
    assert room_for(state, figures, 100, held_bytes, None) == Room(budget_bytes, 100)
    room = room_for(state, figures, 100, held_bytes, spare_bytes)
    assert 0 <= room.budget_bytes <= budget_bytes
    assert room.may_hold_bytes == max(0, held_bytes + spare_bytes)
    # One that sleeps holds none of its keys and values any more: they are part of what is free.
    assert room.budget_bytes <= max(0, spare_bytes + (kv_bytes if state is Presence.ACTIVE else 0))


@in_loop
async def test_its_memory_goes_before_the_end_of_what_it_was_asked_is_waited_for() -> None:
    scene = Scene()
    await scene.asleep()
    await scene.awake()
    ended, cancelled = asyncio.Event(), asyncio.Event()
    computes = scene.partner.computes

    async def slow() -> bool:
        try:
            return await computes()
        finally:
            cancelled.set()
            await ended.wait()

    scene.partner.computes = slow  # type: ignore[method-assign]
    scene.sleeper._question = asyncio.create_task(scene.sleeper._until_it_computes())
    await asyncio.sleep(0)
    sleeping = asyncio.create_task(scene.sleeper._do(Move.SLEEP))
    await cancelled.wait()
    assert scene.kv.presence is Presence.ASLEEP
    assert not sleeping.done()
    ended.set()
    await sleeping
