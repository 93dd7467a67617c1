"""The same small core on both clocks: order, timers, bounds, failures that reach the owner, faults, replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from rose.driver.core import After
from rose.driver.faults import FaultPlan
from rose.driver.real import RealDriver
from rose.driver.virtual import SimulationFailed, VirtualDriver
from rose.errors import ContractError, DeadlineExceeded
from rose.waits import WaitBoard


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for `text` to be performed; with `delay_s`, asks for itself again after that, undelayed."""

    text: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


@dataclass(frozen=True, slots=True)
class Do:
    text: str


class Echo:
    """Turns every Ask into a Do or a timer, keeps every Answer, and breaks on the text 'break'."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.times: list[float] = []

    def step(self, event: Ask | Answer, now: float) -> Sequence[Do | After[Ask | Answer]]:
        self.times.append(now)
        match event:
            case Ask("break"):
                raise ZeroDivisionError("the core broke")
            case Ask(text, 0.0):
                return (Do(text),)
            case Ask(text, delay_s):
                return (After(delay_s, Ask(text)),)
            case Answer(text):
                self.answers.append(text)
        return ()


Perform = Callable[[Do], Awaitable[Sequence[Ask | Answer]]]


async def answer_at_once(action: Do) -> Sequence[Ask | Answer]:
    return (Answer(action.text),)


def real(core: Echo, perform: Perform, waits: WaitBoard | None = None, **settings: Any) -> RealDriver[Ask | Answer, Do]:
    return RealDriver(core, perform, name="echo", waits=waits or WaitBoard(), **settings)


def within_10_s(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(limited())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_real_events_are_stepped_in_order_and_their_answers_come_back() -> None:
    async def work() -> None:
        core = Echo()
        driver = real(core, answer_at_once)
        running = asyncio.create_task(driver.run())
        for n in range(100):
            await driver.send(Ask(str(n)))
        await until(lambda: len(core.answers) == 100)
        driver.stop()
        await running
        assert core.answers == [str(n) for n in range(100)]
        assert core.times == sorted(core.times)

    within_10_s(work())


def test_a_slow_action_holds_up_nobody() -> None:
    async def work() -> None:
        core = Echo()
        release = asyncio.Event()

        async def perform(action: Do) -> Sequence[Ask | Answer]:
            if action.text == "slow":
                await release.wait()
            return (Answer(action.text),)

        driver = real(core, perform)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("slow"))
        await driver.send(Ask("quick"))
        await until(lambda: core.answers == ["quick"])
        release.set()
        await until(lambda: core.answers == ["quick", "slow"])
        driver.stop()
        await running

    within_10_s(work())


def test_a_timer_comes_back_to_the_core() -> None:
    async def work() -> None:
        core = Echo()
        driver = real(core, answer_at_once)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("later", delay_s=0.02))
        await until(lambda: core.answers == ["later"])
        driver.stop()
        await running
        assert core.times[1] - core.times[0] >= 0.02

    within_10_s(work())


def test_what_the_core_raises_comes_out_of_run_and_is_the_cause_of_later_refusals() -> None:
    async def work() -> None:
        driver = real(Echo(), answer_at_once)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("break"))
        with pytest.raises(ZeroDivisionError, match="the core broke"):
            await running
        with pytest.raises(ContractError, match="echo is over") as refused:
            await driver.send(Ask("more"))
        assert isinstance(refused.value.__cause__, ZeroDivisionError)

    within_10_s(work())


def test_what_an_action_raises_comes_out_of_run_and_ends_the_others() -> None:
    async def work() -> None:
        ended = []

        async def perform(action: Do) -> Sequence[Ask | Answer]:
            if action.text == "fail":
                raise OSError("no route")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(action.text)
            return ()

        driver = real(Echo(), perform)
        running = asyncio.create_task(driver.run())
        for text in ("a", "b", "fail"):
            await driver.send(Ask(text))
        with pytest.raises(OSError, match="no route"):
            await running
        assert sorted(ended) == ["a", "b"]

    within_10_s(work())


def test_an_error_raised_while_being_cancelled_is_noted_on_the_first() -> None:
    async def work() -> None:
        async def perform(action: Do) -> Sequence[Ask | Answer]:
            if action.text == "fail":
                raise OSError("no route")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ValueError("bad end") from None
            return ()

        driver = real(Echo(), perform)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("a"))
        await driver.send(Ask("fail"))
        with pytest.raises(OSError, match="no route") as failed:
            await running
        assert "bad end" in failed.value.__notes__[0]

    within_10_s(work())


def test_stop_cancels_actions_and_timers_and_leaves_no_task() -> None:
    async def work() -> None:
        started = []

        async def perform(action: Do) -> Sequence[Ask | Answer]:
            started.append(action.text)
            await asyncio.sleep(60)
            return ()

        core = Echo()
        driver = real(core, perform)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("a"))
        await driver.send(Ask("b", delay_s=60))
        await until(lambda: started == ["a"] and len(core.times) == 2)
        driver.stop()
        await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(ContractError, match="echo is over"):
            await driver.send(Ask("c"))

    within_10_s(work())


def test_what_an_action_raises_while_it_is_stopped_is_not_swallowed() -> None:
    async def work() -> None:
        started = []

        async def perform(action: Do) -> Sequence[Ask | Answer]:
            started.append(action.text)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ValueError("half written") from None
            return ()

        driver = real(Echo(), perform)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("a"))
        await until(lambda: started == ["a"])
        driver.stop()
        with pytest.raises(ValueError, match="half written"):
            await running

    within_10_s(work())


def test_an_owner_that_is_cancelled_leaves_no_task() -> None:
    async def work() -> None:
        started = []

        async def perform(action: Do) -> Sequence[Ask | Answer]:
            started.append(action.text)
            await asyncio.sleep(60)
            return ()

        driver = real(Echo(), perform)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("a"))
        await until(lambda: started == ["a"])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    within_10_s(work())


def test_an_action_that_refuses_to_be_cancelled_is_named() -> None:
    async def work() -> None:
        waits = WaitBoard()
        release = asyncio.Event()
        seen = []

        async def perform(action: Do) -> Sequence[Ask | Answer]:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    seen.append(waits.snapshot()[0].what)
            return ()

        core = Echo()
        driver = real(core, perform, waits, stop_timeout_s=0.05)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("stubborn"))
        await until(lambda: len(core.times) == 1)
        driver.stop()
        with pytest.raises(DeadlineExceeded, match=r"echo: Do\(text='stubborn'\): still running"):
            await running
        assert seen == ["end of its actions"]
        release.set()

    within_10_s(work())


def test_an_action_cancelled_by_somebody_else_is_a_failure() -> None:
    async def work() -> None:
        async def perform(action: Do) -> Sequence[Ask | Answer]:
            raise asyncio.CancelledError

        driver = real(Echo(), perform)
        running = asyncio.create_task(driver.run())
        await driver.send(Ask("a"))
        with pytest.raises(ContractError, match="cancelled from outside"):
            await running

    within_10_s(work())


def test_a_full_queue_makes_the_sender_wait_by_name_and_no_longer_than_its_deadline() -> None:
    async def work() -> None:
        waits = WaitBoard()
        core = Echo()
        driver = real(core, answer_at_once, waits, queue_limit=2, send_timeout_s=0.05)
        await driver.send(Ask("a"))
        await driver.send(Ask("b"))
        sending = asyncio.create_task(driver.send(Ask("c")))
        await until(lambda: bool(waits.snapshot()))
        assert [(wait.what, wait.whom) for wait in waits.snapshot()] == [("room in its queue", "echo")]
        with pytest.raises(DeadlineExceeded, match="echo: no room in its queue"):
            await sending
        running = asyncio.create_task(driver.run())
        await until(lambda: core.answers == ["a", "b"])
        await driver.send(Ask("d"))
        await until(lambda: core.answers == ["a", "b", "d"])
        driver.stop()
        await running

    within_10_s(work())


# The virtual clock


def virtual(
    core: Echo,
    seed: int = 1,
    faults: FaultPlan | None = None,
    check: Callable[[], None] = lambda: None,
    perform: Callable[[Do], Sequence[Ask | Answer]] = lambda action: (Answer(action.text),),
) -> VirtualDriver[Ask | Answer, Do]:
    return VirtualDriver(
        core, perform, check, world="echo", seed=seed, random=Random(seed), faults=faults or FaultPlan()
    )


def test_virtual_time_jumps_and_timers_fire_at_their_time() -> None:
    core = Echo()
    driver = virtual(core)
    driver.after(5.0, Ask("later", delay_s=3600.0))
    driver.after(7.0, Ask("sooner"))
    driver.run(until_s=10_000.0)
    assert core.answers == ["sooner", "later"]
    assert core.times == [5.0, 7.0, 7.0, 3605.0, 3605.0]
    assert driver.now == 10_000.0


def test_what_is_due_after_the_end_does_not_happen() -> None:
    core = Echo()
    driver = virtual(core)
    driver.after(2.0, Ask("a"))
    driver.run(until_s=1.0)
    assert core.answers == []
    driver.run(until_s=2.0)
    assert core.answers == ["a"]


def test_at_one_moment_things_happen_in_the_order_they_were_asked_for() -> None:
    core = Echo()
    driver = virtual(core)
    for n in range(50):
        driver.after(1.0, Answer(str(n)))
    driver.run(until_s=1.0)
    assert core.answers == [str(n) for n in range(50)]


def send_numbers(driver: VirtualDriver[Ask | Answer, Do], count: int, every_s: float = 0.1) -> None:
    """Send 0, 1, 2, … over one link."""

    def send(text: str) -> None:
        driver.send("link", text, 0.05, lambda: driver.feed(Ask(text)))

    for n in range(count):
        driver.call(n * every_s, f"send {n}", partial(send, str(n)))


def storm(seed: int) -> tuple[Echo, VirtualDriver[Ask | Answer, Do]]:
    core = Echo()
    faults = FaultPlan(drop=0.2, duplicate=0.2, reorder=0.3, late=0.5, late_s=1.0, until_s=100.0)
    driver = virtual(core, seed, faults)
    for n in range(200):
        text = str(n)
        driver.call(
            n * 0.1, f"send {n}", lambda text=text: driver.send("link", text, 0.05, lambda: driver.feed(Ask(text)))
        )
    driver.run(until_s=1000.0)
    return core, driver


def test_a_faulty_link_drops_doubles_and_reorders_as_the_seed_says() -> None:
    core, driver = storm(1)
    again = storm(1)[1]
    numbers = [int(text) for text in core.answers]
    assert set(range(200)) - set(numbers)
    assert len(numbers) > len(set(numbers))
    assert numbers != sorted(numbers)
    assert driver.fingerprint() == again.fingerprint()
    assert driver.fingerprint() != storm(2)[1].fingerprint()


def test_a_late_link_without_reordering_keeps_order() -> None:
    core = Echo()
    driver = virtual(core, 3, FaultPlan(late=0.5, late_s=1.0, until_s=100.0))
    send_numbers(driver, 100)
    driver.run(until_s=1000.0)
    assert core.answers == [str(n) for n in range(100)]


def test_the_calm_after_the_faults_is_calm() -> None:
    core = Echo()
    driver = virtual(core, 3, FaultPlan(drop=1.0, until_s=5.0))
    send_numbers(driver, 10, every_s=1.0)
    driver.run(until_s=100.0)
    assert core.answers == ["5", "6", "7", "8", "9"]


def test_crashes_lie_before_the_calm_and_do_not_overlap() -> None:
    crashes = FaultPlan(crashes_per_s=2.0, down_s=1.0, until_s=50.0).crashes(Random(1))
    assert len(crashes) > 20
    assert all(at_s < 50.0 for at_s, _ in crashes)
    assert all(at_s + down_s <= later for (at_s, down_s), (later, _) in pairwise(crashes))
    assert FaultPlan(until_s=50.0).crashes(Random(1)) == []


def broken_check() -> None:
    raise ContractError("two and two are five")


def break_in_the_world() -> None:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("prepare", "check", "why"),
    [
        (lambda driver: driver.after(1.0, Ask("break")), lambda: None, "the core broke"),
        (lambda driver: driver.call(1.0, "a bug", break_in_the_world), lambda: None, "KeyError('gone')"),
        (lambda driver: driver.after(1.0, Answer("fine")), broken_check, "two and two are five"),
    ],
)
def test_whatever_breaks_names_the_seed_the_last_lines_and_the_replay(
    prepare: Callable[[VirtualDriver[Ask | Answer, Do]], None], check: Callable[[], None], why: str
) -> None:
    driver = virtual(Echo(), seed=42, check=check)
    for n in range(100):
        driver.call(0.5 + n / 1000, f"line {n}", lambda: None)
    prepare(driver)
    with pytest.raises(SimulationFailed) as failed:
        driver.run(until_s=2.0)
    assert failed.value.seed == 42
    assert failed.value.__cause__ is not None
    assert len(failed.value.tail) <= 25
    text = str(failed.value)
    assert why in text
    assert text.endswith("replay it with: ./dev python -m rose.simulator echo --seed 42")


def test_a_world_that_never_rests_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.driver.virtual.HAPPENINGS_MAX", 100)
    driver = virtual(Echo())

    def again() -> None:
        driver.call(0.0, "again", again)

    again()
    with pytest.raises(SimulationFailed, match="still busy after 100 happenings"):
        driver.run(until_s=1.0)


def test_an_event_fed_while_actions_are_performed_is_refused() -> None:
    core = Echo()

    def perform(action: Do) -> Sequence[Ask | Answer]:
        driver.feed(Answer(action.text))
        return ()

    driver = virtual(core, perform=perform)
    driver.after(1.0, Ask("a"))
    with pytest.raises(SimulationFailed, match="while the core's actions were being performed"):
        driver.run(until_s=2.0)
