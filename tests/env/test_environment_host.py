from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
from environment_zoo import QUIET, Answering, Async, Hanging, Plain

from rose.env.contract import StepResult
from rose.env.host import EnvironmentHost, HostSettings
from rose.errors import EnvironmentFailed
from rose.waits import WaitBoard

FAST = HostSettings(reset_timeout_s=0.05, step_timeout_s=0.05, close_timeout_s=0.05, max_stuck_calls=2)
SHORT_STEPS = HostSettings(reset_timeout_s=10, step_timeout_s=0.2, close_timeout_s=10)


def failing(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


async def none_stuck(host: EnvironmentHost) -> None:
    async with asyncio.timeout(5):
        while host.stuck:
            await asyncio.sleep(0.001)


def test_an_episode_runs_on_one_thread_of_its_own(board: WaitBoard) -> None:
    made = Plain()

    async def run() -> None:
        host = EnvironmentHost(lambda: made, board)
        episode = await host.open(7, "a")
        assert (episode.first_observation, episode.system_prompt) == ("7/a", "do")
        assert await episode.step("x") is QUIET
        await episode.close()
        await episode.close()

    made.threads.clear()
    asyncio.run(run())
    assert len(made.threads) == 1
    assert threading.get_ident() not in made.threads
    assert made.closed == 1
    assert board.snapshot() == ()


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (failing(ValueError("no such tool")), "ValueError: no such tool"),
        (failing(StopIteration()), "StopIteration"),
        (failing(SystemExit(3)), "SystemExit"),
        (failing(asyncio.CancelledError()), "ancel"),
        (lambda: None, "None"),
        (lambda: ("seen", 1.0, True, False, {}), "tuple"),
        (lambda: StepResult(b"seen", 0.0, False, False), "bytes"),  # type: ignore[arg-type]
        (lambda: StepResult("\ud800", 0.0, False, False), "Unicode"),
        (lambda: StepResult("x" * 1_000_001, 0.0, False, False), "1000001 characters"),
        (lambda: StepResult("seen", float("nan"), False, False), "nan"),
        (lambda: StepResult("seen", float("inf"), False, False), "inf"),
        (lambda: StepResult("seen", 1e308, False, False), "the reward 1e+308; expected a number from -1e+06 to 1e+06"),
        (lambda: StepResult("seen", -(10**400), False, False), "the reward -1000"),
        (lambda: StepResult("seen", "1", False, False), "'1'"),  # type: ignore[arg-type]
        (lambda: StepResult("seen", True, False, False), "True"),
        (lambda: StepResult("seen", 0.0, 1, False), "terminated"),  # type: ignore[arg-type]
        (lambda: StepResult("seen", 0.0, False, False, success=None), "success"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("kind", [Answering, Async])
def test_raising_and_nonsense_are_the_environments_failure(
    kind: Callable[[Callable[[], Any]], Any], step: Callable[[], Any], named: str, board: WaitBoard
) -> None:
    async def run() -> None:
        made = kind(step)
        host = EnvironmentHost(lambda: made, board)
        episode = await host.open(1, "ep-5")
        with pytest.raises(EnvironmentFailed) as caught:
            await episode.step("x")
        assert named in str(caught.value)
        assert "ep-5" in str(caught.value)
        with pytest.raises(EnvironmentFailed, match="after it failed"):
            await episode.step("x")
        await episode.close()
        assert made.closed == 1
        assert host.counts.failed == 1

    asyncio.run(run())


def test_the_largest_reward_is_one(board: WaitBoard) -> None:
    async def run() -> None:
        rewards = iter((1e6, -1e6, 0))
        host = EnvironmentHost(lambda: Answering(lambda: StepResult("seen", next(rewards), False, False)), board)
        episode = await host.open(1, "ep-1")
        assert [(await episode.step("x")).reward for _ in range(3)] == [1e6, -1e6, 0]
        await episode.close()

    asyncio.run(run())


@pytest.mark.parametrize("where", ["construction", "reset"])
def test_a_failed_opening_closes_what_there_is(where: str, board: WaitBoard) -> None:
    made: list[Plain] = []

    class Broken(Plain):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        @property
        def system_prompt(self) -> str:  # type: ignore[override]
            if where == "construction":
                raise OSError("no data")
            return ""

        def reset(self, seed: int, episode_id: str) -> Any:
            return 5

    async def run() -> None:
        with pytest.raises(EnvironmentFailed, match=where):
            await EnvironmentHost(Broken, board).open(1, "a")

    asyncio.run(run())
    assert made[0].closed == 1


def test_a_hung_call_fails_its_episode_alone_and_is_seen_while_it_waits(board: WaitBoard) -> None:
    release = threading.Event()
    hung, well = Hanging(release), Plain()

    async def run() -> None:
        host = EnvironmentHost(iter([hung, well]).__next__, board, FAST)
        bad, good = await host.open(1, "bad"), await host.open(2, "good")
        stepping = asyncio.create_task(bad.step("x"))
        await asyncio.sleep(0)
        assert [(wait.what, wait.whom) for wait in board.snapshot()] == [("step", "environment bad")]
        assert await good.step("x") is QUIET
        with pytest.raises(EnvironmentFailed, match=r"environment bad: no step after 0\.05 s"):
            await stepping
        assert host.stuck == ("step of environment bad",)
        await bad.close()
        assert hung.closed == 0
        assert await good.step("x") is QUIET
        release.set()
        await none_stuck(host)
        assert host.counts.abandoned_calls == 1

    asyncio.run(run())
    for thread in threading.enumerate():
        if thread.name == "environment bad":
            thread.join(5)
    assert hung.closed == 1
    assert board.snapshot() == ()


def test_too_many_stuck_calls_refuse_new_episodes_by_name(board: WaitBoard) -> None:
    release = threading.Event()

    async def run() -> None:
        host = EnvironmentHost(lambda: Hanging(release), board, FAST)
        for name in ("a", "b"):
            episode = await host.open(1, name)
            with pytest.raises(EnvironmentFailed):
                await episode.step("x")
        with pytest.raises(EnvironmentFailed, match="2 earlier calls are stuck, the oldest: step of environment a"):
            await host.open(1, "c")
        assert host.counts.opened == 2
        release.set()
        await none_stuck(host)
        await (await host.open(1, "d")).close()

    asyncio.run(run())


def test_an_async_call_that_overruns_is_cancelled(board: WaitBoard) -> None:
    async def run() -> None:
        made = Async(lambda: asyncio.sleep(60))
        host = EnvironmentHost(lambda: made, board, SHORT_STEPS)
        episode = await host.open(1, "a")
        with pytest.raises(EnvironmentFailed, match="no step"):
            await episode.step("x")
        await episode.close()
        assert host.stuck == ()
        assert made.closed == 1

    asyncio.run(run())


def test_async_calls_share_an_event_loop_that_is_not_the_hosts(board: WaitBoard) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    def step() -> StepResult:
        loops.append(asyncio.get_running_loop())
        return QUIET

    async def run() -> None:
        host = EnvironmentHost(lambda: Async(step), board)
        first, second = await host.open(1, "a"), await host.open(2, "b")
        for episode in (first, second):
            assert await episode.step("x") is QUIET
            await episode.close()
        await host.close()
        assert len(set(loops)) == 1
        assert loops[0] is not asyncio.get_running_loop()

    asyncio.run(run())


def test_an_async_environment_may_start_processes(board: WaitBoard) -> None:
    async def step() -> StepResult:
        child = await asyncio.create_subprocess_exec("echo", "seen", stdout=subprocess.PIPE)
        said, _ = await child.communicate()
        return StepResult(said.decode().strip(), 0.0, child.returncode == 0, False)

    async def run() -> StepResult:
        host = EnvironmentHost(lambda: Async(step), board)
        episode = await host.open(1, "a")
        result = await episode.step("x")
        await episode.close()
        await host.close()
        return result

    assert asyncio.run(run()) == StepResult("seen", 0.0, True, False)


def test_an_async_call_that_never_awaits_is_named_and_holds_up_neither_deadlines_nor_the_end(board: WaitBoard) -> None:
    release = threading.Event()
    steps = iter((lambda: asyncio.sleep(60), lambda: release.wait(60)))

    async def run() -> None:
        settings = HostSettings(reset_timeout_s=10, step_timeout_s=0.2, close_timeout_s=0.05, max_stuck_calls=2)
        host = EnvironmentHost(lambda: Async(next(steps)), board, settings)
        waits, spins = await host.open(1, "waits"), await host.open(1, "spins")
        stepping = [asyncio.create_task(episode.step("x")) for episode in (waits, spins)]
        for failed in await asyncio.gather(*stepping, return_exceptions=True):
            assert isinstance(failed, EnvironmentFailed)
            assert "; step of environment spins does not await, and holds up all other async calls" in str(failed)
        with pytest.raises(EnvironmentFailed) as refused:
            await host.open(1, "c")
        assert "2 earlier calls are stuck, the oldest: step of environment waits" in str(refused.value)
        assert "; step of environment spins does not await, and holds up all other async calls" in str(refused.value)
        await asyncio.gather(waits.close(), spins.close())
        assert host.counts.close_failures == 2
        await host.close()

    asyncio.run(run())
    assert board.snapshot() == ()
    release.set()


def test_who_is_late_beside_others_that_await_blames_nobody(board: WaitBoard) -> None:
    release = threading.Event()
    kinds = iter((Async(lambda: asyncio.sleep(60)), Hanging(release), Async(lambda: asyncio.sleep(60))))

    async def run() -> None:
        host = EnvironmentHost(lambda: next(kinds), board, SHORT_STEPS)
        episodes = [await host.open(1, name) for name in ("a", "b", "c")]
        late = await asyncio.gather(*(episode.step("x") for episode in episodes), return_exceptions=True)
        assert [str(error).split("; ")[1:] for error in late] == [[], [], []]
        release.set()
        for episode in episodes:
            await episode.close()
        await host.close()

    asyncio.run(run())


def test_an_async_call_that_ignores_its_cancellation_holds_up_nobody(board: WaitBoard) -> None:
    over = threading.Event()

    async def ignores() -> StepResult:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        return QUIET

    well = Async()
    made = iter((Async(ignores), well))

    async def run() -> None:
        host = EnvironmentHost(lambda: next(made), board, SHORT_STEPS)
        bad, good = await host.open(1, "bad"), await host.open(2, "good")
        with pytest.raises(EnvironmentFailed, match="bad: no step"):
            await bad.step("x")
        assert host.stuck == ("step of environment bad",)
        assert await good.step("x") is QUIET
        await asyncio.gather(bad.close(), good.close())
        assert host.counts.close_failures == 0
        over.set()
        await host.close()

    asyncio.run(run())
    assert well.closed == 1


def test_what_async_environments_left_running_is_ended_with_the_host(board: WaitBoard) -> None:
    ended: list[str] = []
    left: list[asyncio.Task[None]] = []

    async def lingers() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("tidied up")

    async def exits() -> None:
        raise SystemExit(3)

    async def step() -> StepResult:
        left.extend(asyncio.create_task(each()) for each in (lingers, exits))
        await asyncio.sleep(0)
        return QUIET

    async def run() -> None:
        host = EnvironmentHost(lambda: Async(step), board)
        for name in ("a", "b"):
            episode = await host.open(1, name)
            assert await episode.step("x") is QUIET
            await episode.close()
        assert ended == []
        await host.close()

    asyncio.run(run())
    assert ended == ["tidied up", "tidied up"]
    assert [type(task.exception()) for task in left if not task.cancelled()] == [SystemExit, SystemExit]


def test_a_cancelled_step_leaves_no_wait_and_the_loop_free(board: WaitBoard) -> None:
    release = threading.Event()

    async def run() -> None:
        host = EnvironmentHost(lambda: Hanging(release), board)
        episode = await host.open(1, "a")
        stepping = asyncio.create_task(episode.step("x"))
        await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        assert board.snapshot() == ()
        await episode.close()

    asyncio.run(run())
    release.set()


@pytest.mark.parametrize("kind", [Plain, Async])
def test_a_failing_close_is_counted_and_fails_nobody(kind: type, board: WaitBoard) -> None:
    class Sticky(kind):  # type: ignore[misc]
        def close(self) -> None:
            raise RuntimeError("still mounted")

    async def run() -> None:
        host = EnvironmentHost(Sticky, board)
        await (await host.open(1, "a")).close()
        assert host.counts.close_failures == 1

    asyncio.run(run())


HUNG = {
    "plain": "def step(self, action): time.sleep(600)",
    "async spins": "async def step(self, action):\n        while True: pass",
    "async blocks": "async def step(self, action): time.sleep(600)",
    "async ignores cancellation": """async def step(self, action):
        while True:
            try: await asyncio.sleep(600)
            except BaseException: pass""",
    "async hands on": "async def step(self, action): await asyncio.to_thread(time.sleep, 600)",
}


@pytest.mark.parametrize("kind", HUNG)
def test_a_hung_environment_does_not_hold_up_the_exit_of_the_process(kind: str) -> None:
    script = textwrap.dedent(
        """
        import asyncio, time
        from rose.env.contract import StepResult
        from rose.env.host import EnvironmentHost, HostSettings
        from rose.errors import EnvironmentFailed
        from rose.waits import WaitBoard

        class Hung:
            system_prompt = ""
            def reset(self, seed, episode_id): return ""
            STEP
            def close(self): time.sleep(600)

        async def main():
            host = EnvironmentHost(Hung, WaitBoard(), HostSettings(0.05, 0.05, 0.05))
            episode = await host.open(1, "a")
            try:
                await episode.step("x")
            except EnvironmentFailed:
                await episode.close()
                await host.close()
                print("left")

        asyncio.run(main())
        """
    ).replace("STEP", HUNG[kind])
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "left\n"
    assert ended.stderr == ""
