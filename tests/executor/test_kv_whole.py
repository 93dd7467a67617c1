"""The whole way of a burst: serving's halves on the board, the watch and its policy, a real guest, and its pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from random import Random
from typing import Any

import pytest
from test_quota_scheduler import greedy

from rose.slo import Slo
from rose_executor.board import SERVING, SERVING_KV, HalfWriter
from rose_executor.board_states import ServingKv, ServingState
from rose_executor.guest_memory import host_memory
from rose_executor.guest_rules import GuestRules
from rose_executor.guest_watch import GuestWatch
from rose_executor.kv_budget import KvBudget
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.partition_terms import Partition, Role
from rose_executor.slack import SlackPolicy
from rose_executor.token_route import TokenRoute

pytestmark = pytest.mark.engine

MIB = 2**20
POOL = KvPool(pool_bytes=64 * MIB, serving_bytes=64 * MIB, guest_bytes=48 * MIB)
TOKENS = 300


class Brake:
    """No guest here disobeys."""

    def place(self, pid: int, role: Role) -> None: ...
    def freeze(self) -> None:
        raise AssertionError("the guest was frozen")

    def thaw(self) -> None: ...
    def describe(self) -> Partition:
        return Partition("none", "", "", 1.0)

    def close(self) -> None: ...


class Served:
    """A serving engine that owes nobody anything, and whose cache fills and empties as the test says."""

    def __init__(self, path: Any) -> None:
        self.used_bytes = 8 * MIB
        self._state, self._kv = HalfWriter(path, SERVING), HalfWriter(path, SERVING_KV)

    def beat(self) -> None:
        self._state.write(ServingState(stepped_at_s=time.monotonic(), kv_blocks_total=1000))
        self._kv.write(ServingKv(POOL.serving_bytes, self.used_bytes))

    def close(self) -> None:
        self._state.close()
        self._kv.close()


def test_a_burst_of_serving_takes_the_guests_memory_and_no_token(rig: Any) -> None:
    path = rig.folder / "whole-board"
    budget = KvBudget(KvPolicy(POOL))
    rules = GuestRules(SlackPolicy(Slo(10.0, 1.0), 4096, 16), budget)
    engine = rig.new_engine("whole", board=path, kv_cache_bytes=POOL.guest_bytes)

    async def run(watch: GuestWatch, served: Served) -> None:
        async def looks() -> None:
            while True:
                served.beat()
                watch.look()
                await asyncio.sleep(0.01)

        async def until(what: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not what():
                    await asyncio.sleep(0.01)

        def used_blocks() -> int:
            guest = None if watch.seen is None else watch.seen.guest.state
            return 0 if guest is None else guest.kv_blocks_used

        looking = asyncio.create_task(looks())
        await engine.start(0)
        reference = await greedy(rig.route(), "whole-reference", TOKENS)
        route = TokenRoute(engine.base_url, rig.session, engine_id="whole", waits=rig.waits)
        seeded = Random(5)
        fill = [[seeded.randrange(90) for _ in range(480)] for _ in range(200)]
        await asyncio.gather(
            *(
                route.generate(f"w{index}", prompt, max_tokens=1, temperature=0.0, stop_token_ids=())
                for index, prompt in enumerate(fill)
            )
        )
        full = host_memory(engine.pid).resident_bytes
        assert budget.figures(time.monotonic()).budget_bytes > 40 * MIB
        streams = asyncio.create_task(greedy(route, "whole-burst", TOKENS))
        await until(lambda: used_blocks() > 0)
        served.used_bytes = 56 * MIB
        await until(lambda: host_memory(engine.pid).resident_bytes < full - 30 * MIB)
        cut = budget.figures(time.monotonic())
        assert cut.cuts >= 1
        assert cut.budget_bytes + served.used_bytes < POOL.pool_bytes
        await until(lambda: budget.figures(time.monotonic()).held_bytes <= cut.budget_bytes)
        served.used_bytes = 0
        assert await streams == reference
        assert budget.figures(time.monotonic()).grows == 1  # frozen: it came through on what the cut left
        looking.cancel()

    with closing(GuestWatch(path, rules, Brake())) as watch, closing(Served(path)) as served:
        try:
            rig.run(run(watch, served))
        finally:
            rig.run(engine.stop())
