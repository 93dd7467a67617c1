"""A real guest whose memory is taken: asleep, awake with the same answer, gone, and started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from run_tools import lending_run, lifted_guests, until
from test_agent_engine import KV_BYTES, Executor, executor
from test_quota_scheduler import PROMPTS

from rose_executor.board import QUOTA, SERVING_KV, BoardReader, HalfWriter
from rose_executor.board_states import ServingKv
from rose_executor.guest_memory import host_memory
from rose_executor.kv_budget import KvBudget
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.token_route import TokenRoute, open_session

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True, scope="module")
def _guests_get_a_core() -> Iterator[None]:
    with lifted_guests():
        yield


POOL = KvPool(2 * KV_BYTES, 2 * KV_BYTES, KV_BYTES, freeze_s=1.0, window_s=2.0)
TOKENS, FILL = 200, 200
KEEP_FREE = 10 * 2**30


class Served:
    """What the serving engine holds of the pool, on the board."""

    def __init__(self, board: Path) -> None:
        self.used_bytes = 0
        self._board = board

    async def run(self) -> None:
        await until(self._board.exists)
        with closing(HalfWriter(self._board, SERVING_KV)) as writer:
            while True:
                writer.write(ServingKv(POOL.serving_bytes, self.used_bytes))
                await asyncio.sleep(0.05)


@asynccontextmanager
async def served(board: Path) -> AsyncIterator[Served]:
    serving = Served(board)
    running = asyncio.create_task(serving.run())
    try:
        yield serving
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def filled(route: TokenRoute) -> None:
    """Most of the cache holds prefixes that somebody may ask for again."""
    seeded = Random(5)
    prompts = [[seeded.randrange(90) for _ in range(240)] for _ in range(FILL)]
    await asyncio.gather(
        *(
            route.generate(f"fill-{index}", prompt, max_tokens=1, temperature=0.0, stop_token_ids=())
            for index, prompt in enumerate(prompts)
        )
    )


async def answer(route: TokenRoute, name: str) -> tuple[int, ...]:
    output = await route.generate(name, PROMPTS[0][:20], max_tokens=TOKENS, temperature=0.0, stop_token_ids=())
    return tuple(output.output_ids)


def gate_open(board: BoardReader) -> bool:
    quota = board.read(QUOTA, time.monotonic()).state
    return quota is not None and quota.gate_open


def asleep(here: Executor) -> bool:
    return here.part("guest")[0] == "asleep"


def test_a_guest_without_memory_sleeps_wakes_with_the_same_answer_goes_and_comes_again(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [2 * KEEP_FREE]
    monkeypatch.setattr("rose_executor.guest_keeper.memory_available_bytes", lambda: left[0])

    async def check() -> None:
        async with (
            lending_run(tmp_path, rig.model) as run,
            executor(rig, run, tmp_path, kv=KvBudget(KvPolicy(POOL)), keep_free_bytes=KEEP_FREE) as here,
            served(tmp_path / "board") as serving,
            open_session() as session,
        ):
            run.answers = True
            await run.publish(0)
            await until(lambda: run.engines)
            async with run.lease() as lease:
                lease.tokens = 0
            route = TokenRoute(lease.address, session, engine_id="lent")
            reference = await answer(route, "reference")
            await filled(route)
            full = host_memory(here.pids[-1])
            slept = asyncio.create_task(answer(route, "slept"))
            serving.used_bytes = POOL.serving_bytes
            await until(lambda: asleep(here))
            with closing(BoardReader(tmp_path / "board")) as board:
                await until(lambda: not gate_open(board))
                asked = asyncio.create_task(answer(route, "asked asleep"))
                await until(lambda: not run.engines)
                await until(lambda: "holds" in here.part("guest")[1])
                await until(lambda: here.sample("presence_bytes", state="asleep") < own(full) - KV_BYTES // 2)
                assert here.sample("slots_open") == 0
                assert here.sample("presence", state="asleep") == 1
                assert host_memory(here.pids[-1]).resident_bytes < full.resident_bytes - KV_BYTES // 2
                assert not asked.done()
                serving.used_bytes = 0
                await until(lambda: gate_open(board))
            assert await slept == await asked == reference
            await until(lambda: here.sample("presence_seconds", state="asleep"))
            await until(lambda: run.engines)
            counted = await here.counts.counts(lease.incarnation)
            assert counted.total_tokens == 3 * TOKENS + FILL  # of its waking, none
            await gone_and_again(here, run, serving, left, session, reference)

    rig.run(check())


async def gone_and_again(
    here: Executor, run: Any, serving: Served, left: list[int], session: Any, reference: tuple[int, ...]
) -> None:
    serving.used_bytes = POOL.serving_bytes
    await until(lambda: asleep(here))
    assert "woke in" in here.part("guest")[1]
    left[0] = KEEP_FREE // 2
    await until(lambda: here.part("guest")[0] == "gone")
    assert here.part("guest")[1].startswith("what it holds even asleep is more than there is room for, started in ")
    await until(lambda: not psutil.pid_exists(here.pids[-1]))
    await until(lambda: not run.desk.core.engines)
    assert len(here.pids) == 1
    left[0] = 2 * KEEP_FREE
    serving.used_bytes = 0
    await until(lambda: run.engines)
    assert len(here.pids) == 2
    async with run.lease() as lease:
        lease.tokens = 0
    assert await answer(TokenRoute(lease.address, session, engine_id="lent"), "again") == reference
    assert here.sample("guest_restarts_total") == 0
    assert here.part("restarts")[0] == "none due"


def own(memory: Any) -> int:
    return int(memory.resident_bytes if memory.own_bytes is None else memory.own_bytes)
