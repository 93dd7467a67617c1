"""The supervisor: whoever waits for an engine gets a live one or an error, and every count it gives is final."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ClusterError, DeadlineExceeded, EngineError
from rose.waits import WaitBoard
from rose_executor import supervisor as module
from rose_executor.engine_health import EngineHealth, EngineState
from rose_executor.launcher import LauncherDied
from rose_executor.page_reader import PageReader
from rose_executor.page_writer import PageWriter
from rose_executor.supervisor import EngineSupervisor, LiveEngine
from rose_executor.token_page import RequestCount


@dataclass
class Settings:
    engine_id: str = "engine-0"
    log_path: Path = Path("engine.log")


class ScriptedProcess:
    """An `EngineProcess` that starts as told, on a real token page, and dies when told."""

    base_url = "http://127.0.0.1:1"
    control = None

    def __init__(self, folder: Path, failures: list[Exception | None]) -> None:
        self.settings = Settings()
        self.starts = 0
        self.stopped = False
        self.no_room = ""
        self.asked_for_room = 0
        self._folder = folder
        self._failures = failures
        self._ended: asyncio.Future[int] | None = None

    @property
    def incarnation(self) -> str:
        return f"{self.starts:016x}"

    @property
    def alive(self) -> bool:
        return self._ended is not None and not self._ended.done()

    def lacks_room(self) -> str:
        self.asked_for_room += 1
        return self.no_room

    async def start(self, version: int, path: Path, launched: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        failure = self._failures.pop(0) if self._failures else None
        if isinstance(failure, LauncherDied):
            raise failure
        self.starts += 1
        launched()
        if failure is not None:
            raise failure
        file = self._folder / f"{self.incarnation}.page"
        self.writer = PageWriter(file, incarnation=self.incarnation, slots=4)
        self.page = PageReader(file)
        self._ended = asyncio.get_running_loop().create_future()

    def die(self, code: int) -> None:
        assert self._ended is not None
        self._ended.set_result(code)

    async def wait_dead(self) -> int:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def death(self) -> str:
        assert self._ended is not None
        return f"death of {self._ended.result()}"

    def kill(self) -> None:
        if self.alive:
            self.die(-9)

    async def stop(self) -> None:
        self.stopped = True
        self.kill()


@dataclass
class Source:
    """Says what was asked of it, in order."""

    said: list[tuple[Any, ...]]
    version: int = 7
    path: Path = Path("v7")

    async def starting(self, engine_id: str, lost_incarnation: str | None) -> Source:
        self.said.append(("starting", lost_incarnation))
        return self

    async def joined(self, engine_id: str, incarnation: str, version: int) -> None:
        self.said.append(("joined", incarnation, version))


@dataclass
class Bench:
    """A supervised scripted process and everything that it says."""

    folder: Path
    failures: list[Exception | None] = field(default_factory=list)
    restarts_max: int = 2
    no_room: str = ""
    ready_timeout_s: float = 5.0
    said: list[tuple[Any, ...]] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    joined: list[LiveEngine] = field(default_factory=list)

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            self.waits = WaitBoard()
            self.health = EngineHealth(self.restarts_max, backoff_s=0.001)
            self.process = ScriptedProcess(self.folder, self.failures)
            self.process.no_room = self.no_room
            self.supervisor = EngineSupervisor(
                self.process,  # type: ignore[arg-type]
                self.health,
                None,  # type: ignore[arg-type]
                self.waits,
                turn_timeout_s=1.0,
                ready_timeout_s=self.ready_timeout_s,
                told=lambda state, detail: self.said.append((state,)),
                restarts=self.restarts.append,
                joins=self.joined.append,
            )
            self.running = asyncio.create_task(self.supervisor.run(Source(self.said)))
            try:
                async with asyncio.timeout(10):
                    await body()
            finally:
                await self.supervisor.stop()
                await asyncio.wait([self.running])

        asyncio.run(whole())


async def dead(engine: LiveEngine) -> None:
    await asyncio.wait_for(engine.dead.wait(), 5)


def test_an_engine_is_handed_out_once_it_has_joined(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        engine = await bench.supervisor.ready()
        assert (engine.incarnation, engine.total_tokens()) == (bench.process.incarnation, 0)
        assert bench.joined == [engine]
        assert await bench.supervisor.ready() is engine

    bench.run(body)
    assert bench.said == [("starting", None), ("starting",), ("joined", f"{1:016x}", 7), ("ready",), ("ended",)]
    assert bench.process.stopped
    assert bench.restarts == []


def test_a_death_is_told_before_the_next_start_and_the_page_of_the_dead_stays_readable(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        first = await bench.supervisor.ready()
        bench.process.writer.add("r", 3)
        bench.process.die(-11)
        await dead(first)
        second = await bench.supervisor.ready()
        assert second.incarnation != first.incarnation
        assert (first.total_tokens(), second.total_tokens()) == (3, 0)

    bench.run(body)
    assert ("starting", f"{1:016x}") in bench.said
    assert bench.restarts == ["death of -11"]


def test_failed_starts_are_repeated_told_and_bounded(tmp_path: Path) -> None:
    failures = [
        EngineError("no memory", to_do="see the log"),
        DeadlineExceeded("too slow", boundary="engine"),
        EngineError("the last"),
    ]
    bench = Bench(tmp_path, list(failures))

    async def body() -> None:
        waiting = asyncio.create_task(bench.supervisor.ready())
        await asyncio.wait([bench.running])
        with pytest.raises(EngineError, match=r"given up after 2 restarts: the last; see engine\.log$"):
            await bench.running
        waiting.cancel()

    bench.run(body)
    assert bench.process.starts == 3
    assert [said for said in bench.said if said == ("dead",)] == [("dead",)] * 3
    # A death that no restart follows is not a restart.
    assert bench.restarts == ["no memory", "too slow"]


def test_what_no_restart_can_mend_ends_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [ClusterError("port 5 is taken")])

    async def body() -> None:
        await asyncio.wait([bench.running])
        with pytest.raises(ClusterError, match="port 5"):
            await bench.running

    bench.run(body)
    assert bench.process.starts == 1


def test_the_launchers_death_ends_at_once_and_is_no_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [None, LauncherDied("the warm process died (signal 9)")])

    async def body() -> None:
        await bench.supervisor.ready()
        bench.process.die(-9)
        await asyncio.wait([bench.running])
        with pytest.raises(LauncherDied) as caught:
            await bench.running
        assert str(caught.value) == "engine: the warm process died (signal 9)"

    bench.run(body)
    assert bench.restarts == []


def test_waiting_for_an_engine_has_a_name_and_a_deadline(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [EngineError("x")] * 3, restarts_max=0, ready_timeout_s=0.05)

    async def body() -> None:
        await asyncio.wait([bench.running])
        waiting = asyncio.create_task(bench.supervisor.ready())
        await asyncio.sleep(0)
        assert [(wait.what, wait.whom) for wait in bench.waits.snapshot()] == [("engine", "engine-0")]
        with pytest.raises(DeadlineExceeded, match="no engine"):
            await waiting

    bench.run(body)


def test_only_the_live_incarnation_is_replaced_and_the_reason_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        first = await bench.supervisor.ready()
        await bench.supervisor.replace("another", "old news")
        assert not first.dead.is_set()
        await bench.supervisor.replace(first.incarnation, "weights are mixed")
        await dead(first)
        second = await bench.supervisor.ready()
        await bench.supervisor.replace(first.incarnation, "again")
        bench.process.die(1)
        await dead(second)
        await bench.supervisor.ready()

    bench.run(body)
    assert bench.restarts == ["weights are mixed", "death of 1"]


def test_a_count_is_final_once_the_engine_has_finished_the_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        engine = await bench.supervisor.ready()
        bench.process.writer.add("r", 2)
        counting = asyncio.create_task(engine.final_request("r"))
        await asyncio.sleep(0.05)
        assert not counting.done()
        bench.process.writer.add("r", 1)
        bench.process.writer.finish("r")
        assert (await counting) == RequestCount(3, 0, 0, True)

    bench.run(body)


def test_a_count_is_final_once_the_engine_is_dead(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        engine = await bench.supervisor.ready()
        bench.process.writer.add("r", 2)
        counting = asyncio.create_task(engine.final_request("r"))
        bench.process.die(-9)
        assert (await counting) == RequestCount(2, 0, 0, True)
        assert (await engine.final_request("never asked")).tokens == 0

    bench.run(body)


def test_an_engine_that_never_finishes_a_request_is_ended_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COUNT_TIMEOUT_S", 0.05)
    bench = Bench(tmp_path)

    async def body() -> None:
        engine = await bench.supervisor.ready()
        for request in ("a", "b"):
            bench.process.writer.add(request, 4)
        counts = await asyncio.gather(engine.final_request("a"), engine.final_request("b"))
        assert [count.tokens for count in counts] == [4, 4]
        assert engine.dead.is_set()
        assert await bench.supervisor.ready() is not engine

    bench.run(body)
    assert len(bench.restarts) == 1
    assert "was silent: engine-0: no final count" in bench.restarts[0]


def test_news_of_a_death_are_waited_for_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        engine = await bench.supervisor.ready()
        waiting = asyncio.create_task(engine.news_of_death())
        await asyncio.sleep(0)
        assert [wait.what for wait in bench.waits.snapshot()] == ["news of its death"]
        bench.process.die(-9)
        await waiting
        assert engine.dead.is_set()
        monkeypatch.setattr(module, "NEWS_TIMEOUT_S", 0.01)
        alive = await bench.supervisor.ready()
        await alive.news_of_death()
        assert not alive.dead.is_set()

    bench.run(body)


def test_after_stop_the_incarnation_counts_as_dead_and_nobody_restarts_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    kept: list[LiveEngine] = []

    async def body() -> None:
        kept.append(await bench.supervisor.ready())
        bench.process.writer.add("r", 1)
        await bench.supervisor.stop()
        assert (await kept[0].final_request("r")).tokens == 1

    bench.run(body)
    assert bench.process.starts == 1
    assert bench.restarts == []


def test_who_holds_an_engine_that_does_not_end_hears_that_it_is_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    end: Any = None

    async def hangs() -> None:
        bench.process.stop = end  # type: ignore[method-assign]
        raise DeadlineExceeded("it does not end", boundary="engine")

    async def body() -> None:
        nonlocal end
        engine = await bench.supervisor.ready()
        end, bench.process.stop = bench.process.stop, hangs  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded):
            await bench.supervisor.stop()
        assert engine.dead.is_set()

    bench.run(body)


@pytest.mark.parametrize("failures", [[], [EngineError("no memory")] * 3], ids=["starts", "fails"])
@pytest.mark.parametrize("turns", range(8))
def test_stop_may_come_at_any_moment_of_a_start(turns: int, failures: list[Exception | None], tmp_path: Path) -> None:
    bench = Bench(tmp_path, list(failures))

    async def body() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await bench.supervisor.stop()
        said = list(bench.said)
        assert said[-1] == ("ended",)
        await bench.running  # raises nothing
        assert not bench.process.alive
        assert all(engine.dead.is_set() for engine in bench.joined)
        assert bench.said == said

    bench.run(body)


def test_an_engine_that_is_held_down_is_gone_until_it_is_let_up_and_that_is_no_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, restarts_max=0)

    async def body() -> None:
        for starts in (1, 2):
            engine = await bench.supervisor.ready()
            assert bench.process.starts == starts
            await bench.supervisor.hold_down()
            await dead(engine)
            waiting = asyncio.create_task(bench.supervisor.ready())
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not waiting.done()
            assert bench.process.starts == starts
            await bench.supervisor.let_up()
            assert (await waiting).incarnation != engine.incarnation
            await asyncio.sleep(0.001)  # it is watched by now
        assert bench.restarts == []

    bench.run(body)


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("end", ["a kill", "a death"])
def test_an_end_that_is_ordered_as_an_engine_dies_is_said_of_no_later_one(tmp_path: Path, end: str) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        first = await bench.supervisor.ready()
        bench.process.die(-9)
        await bench.supervisor.hold_down()
        await dead(first)
        await until(lambda: bench.health.state is EngineState.HELD)
        await bench.supervisor.let_up()
        second = await bench.supervisor.ready()
        if end == "a kill":
            second.kill("it went on computing")
        else:
            bench.process.die(-11)
        await dead(second)
        await bench.supervisor.ready()

    bench.run(body)
    assert bench.restarts == ["it went on computing" if end == "a kill" else "death of -11"]


def test_an_engine_whose_end_had_no_effect_can_be_ended_again_and_the_first_reason_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def body() -> None:
        engine = await bench.supervisor.ready()
        kill, deaf = bench.process.kill, [True]
        bench.process.kill = lambda: None if deaf.pop() else kill()  # type: ignore[method-assign]
        engine.kill("it went on computing")
        assert not deaf
        deaf.append(False)
        engine.kill("it was frozen anew")
        await dead(engine)
        bench.process.kill = kill  # type: ignore[method-assign]
        await bench.supervisor.ready()

    bench.run(body)
    assert bench.restarts == ["it went on computing"]


def test_a_start_waits_by_name_for_room_on_the_disk_and_that_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_ROOM_AGAIN_S", 0.001)
    bench = Bench(tmp_path, restarts_max=0, no_room="the disk is full")

    async def body() -> None:
        await until(lambda: bench.process.asked_for_room > 5)
        await until(
            lambda: ("room for its token page", "engine-0") in {(w.what, w.whom) for w in bench.waits.snapshot()}
        )
        assert bench.said[-1] == ("waits",)
        assert bench.process.starts == 0
        bench.process.no_room = ""
        await bench.supervisor.ready()

    bench.run(body)
    assert [said for said in bench.said if len(said) == 1] == [("waits",), ("starting",), ("ready",), ("ended",)]
    assert len([line for line in caplog.messages if "the disk is full" in line]) == 1
    assert bench.restarts == []


def test_an_engine_that_waits_for_room_can_be_held_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM_AGAIN_S", 0.001)
    bench = Bench(tmp_path, restarts_max=0, no_room="the disk is full")

    async def body() -> None:
        await until(lambda: bench.process.asked_for_room)
        await bench.supervisor.hold_down()
        await until(lambda: bench.health.state is EngineState.HELD)
        bench.process.no_room = ""
        await bench.supervisor.let_up()
        await bench.supervisor.ready()

    bench.run(body)
    assert bench.process.starts == 1
    assert bench.restarts == []


def test_stop_waits_for_what_is_under_way(tmp_path: Path) -> None:
    """What takes a while to end when it is cancelled finds its process still there."""
    bench = Bench(tmp_path)
    order: list[str] = []

    async def body() -> None:
        begun, let = asyncio.Event(), asyncio.Event()
        end = bench.process.stop

        async def start(*_: object) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await let.wait()
                order.append("start is over")

        async def stop() -> None:
            order.append("process ends")
            await end()

        bench.process.start, bench.process.stop = start, stop  # type: ignore[method-assign]
        await begun.wait()
        stopping = asyncio.create_task(bench.supervisor.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        let.set()
        await stopping

    bench.run(body)
    assert order[:2] == ["start is over", "process ends"]
