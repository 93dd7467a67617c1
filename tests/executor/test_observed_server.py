"""A stock vLLM server, without any plugin of ours, beside a guest: seen at work, idle, dead, started anew."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from serving_server import ServingServer

from rose.slo import Slo
from rose.waits import WaitBoard
from rose_executor.board import GUEST, QUOTA, SERVING, BoardReader, claim_quota
from rose_executor.board_states import Quota
from rose_executor.guest_rules import LOOK_S, GuestRules, Looked, Write
from rose_executor.kv_budget import FixedBlocks
from rose_executor.partition_terms import Partition
from rose_executor.serving_observer import ServingObserver
from rose_executor.slack import SlackPolicy
from rose_executor.tiers import FIXED_SPLIT, Tier, tier_now

pytestmark = pytest.mark.engine

# No machine is too busy for that, so that a gate is shut for no other reason than the test's own.
SLO = Slo(ttft_s=60.0, tpot_s=30.0)
LOOSE = Partition("none", "", "", 1.0, holds=False)


@pytest.fixture(scope="module")
def serving(rig: Any) -> Iterator[ServingServer]:
    path = rig.folder / "observed-board"
    claim_quota(path).close()
    server = ServingServer(rig, path, {"VLLM_PLUGINS": ""})
    rig.run(server.start())
    yield server
    rig.run(server.kill())


@asynccontextmanager
async def observed(serving: ServingServer) -> AsyncIterator[ServingObserver]:
    observer = ServingObserver(f"{serving.url}/metrics", serving.board, WaitBoard())
    running = asyncio.create_task(observer.run())
    try:
        yield observer
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


class Guarded:
    """What the executor's rules make of the board, as `GuestWatch` asks them."""

    def __init__(self, board: Path) -> None:
        self._board = board
        self._rules = GuestRules(SlackPolicy(SLO, 256, 16), FixedBlocks(2**31))

    async def run(self) -> None:
        with closing(claim_quota(self._board)) as writer, closing(BoardReader(self._board)) as reader:
            while True:
                now_s = time.monotonic()
                for action in self._rules.step(Looked(reader.read(SERVING, now_s), reader.read(GUEST, now_s)), now_s):
                    assert isinstance(action, Write)
                    writer.write(action.quota)
                await asyncio.sleep(LOOK_S)


async def gate(board: Path, open_: bool) -> Quota:
    """The quota, as soon as its gate is so."""
    async with asyncio.timeout(30):
        while True:
            with closing(BoardReader(board)) as reader:
                quota = reader.read(QUOTA, time.monotonic()).state
            if quota is not None and quota.gate_open == open_:
                return quota
            await asyncio.sleep(0.005)


def test_a_stock_server_is_seen_in_line_at_work_and_idle(serving: ServingServer) -> None:
    async def run() -> None:
        async with observed(serving):
            began = await serving.seen(lambda state: state is not None and state.idle)
            assert began is not None
            assert began.kv_blocks_total > 0
            assert tier_now(began, LOOSE, FIXED_SPLIT).tier is Tier.OBSERVE
            began_s = time.monotonic()
            work = asyncio.gather(*(serving.complete(400) for _ in range(16)))
            queue = await serving.seen(lambda state: state is not None and state.waiting > 0 and state.running == 4)
            assert queue is not None
            assert queue.decoding == 4
            assert queue.waiting == queue.unanswered <= 12
            assert began_s - 30 < queue.oldest_unanswered_at_s <= queue.looked_at_s
            assert 0 < queue.kv_blocks_used <= queue.kv_blocks_total
            assert await work == [400] * 16
            idle = await serving.seen(lambda state: state is not None and state.idle and state.steps > 0)
            assert idle is not None
            took_s = time.monotonic() - began_s
            assert idle.steps - began.steps >= 4 * 400
            assert 0 < idle.next_step_s < took_s
            assert 0 < idle.first_token_s < took_s
            assert began.busy_s < idle.busy_s < began.busy_s + took_s + 1

    serving.rig.run(run())


def test_a_guests_gate_follows_what_is_seen_of_a_server_that_dies_and_comes_back(serving: ServingServer) -> None:
    async def run() -> None:
        async with observed(serving) as observer:
            guarding = asyncio.create_task(Guarded(serving.board).run())
            began_s = time.monotonic()
            # Not what the observer before this one has left on the board.
            before = await serving.seen(lambda state: state is not None and state.looked_at_s >= began_s)
            assert before is not None
            await gate(serving.board, open_=True)
            await serving.kill()
            await gate(serving.board, open_=False)
            assert await serving.seen(lambda state: state is None) is None
            assert observer.trouble
            await serving.start()
            back = await serving.seen(lambda state: state is not None)
            assert back is not None
            assert back.steps >= before.steps  # it goes on counting, though the engine began anew
            await gate(serving.board, open_=True)
            assert await serving.complete(50) == 50
            await serving.seen(lambda state: state is not None and state.steps >= before.steps + 50)
            assert not guarding.done()
            guarding.cancel()

    serving.rig.run(run())


def test_a_stopped_server_is_unknown(serving: ServingServer) -> None:
    async def run() -> None:
        async with observed(serving):
            assert await serving.seen(lambda state: state is not None)
            assert serving.child is not None
            serving.child.signal(signal.SIGSTOP)
            try:
                assert await serving.seen(lambda state: state is None) is None
            finally:
                serving.child.signal(signal.SIGCONT)
            assert await serving.seen(lambda state: state is not None)
            assert await serving.complete(5) == 5

    serving.rig.run(run())
