"""Two engines that start at the same moment, on boards of their own and on one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_quota_scheduler import FREE, Guest, greedy

from rose.errors import EngineError
from rose_executor.board import claim_quota

pytestmark = pytest.mark.engine


def test_two_guests_that_start_at_once_get_their_memory_and_compute_the_same(rig: Any) -> None:
    """Neither measures what is free while the other takes it: both have the size that they were given."""
    names = ("twin-a", "twin-b")
    paths = [rig.folder / f"{name}-board" for name in names]
    guests = [Guest(rig, rig.new_engine(name, board=path), path) for name, path in zip(names, paths, strict=True)]

    async def run() -> None:
        await asyncio.gather(*(guest.engine.start(0) for guest in guests))
        async with guests[0].renewed(), guests[1].renewed():
            outputs = await asyncio.gather(*(greedy(one.route(), one.path.name, tokens=40) for one in guests))
            assert outputs[0] == outputs[1] == await greedy(rig.route(), "no-twin", tokens=40)
            totals = [(await one.taken(FREE)).kv_blocks_total for one in guests]
            assert totals[0] == totals[1] > 0

    try:
        rig.run(run())
    finally:
        for guest in guests:
            rig.run(guest.engine.stop())


def test_of_two_guests_that_start_at_once_on_one_board_one_is_refused(rig: Any) -> None:
    board = rig.folder / "one-board"
    claim_quota(board).close()
    engines = [rig.new_engine(name, board=board) for name in ("rival-a", "rival-b")]

    async def run() -> None:
        ends = await asyncio.gather(*(engine.start(0) for engine in engines), return_exceptions=True)
        (refused,) = (end for end in ends if isinstance(end, BaseException))
        assert isinstance(refused, EngineError)
        assert "has a live writer" in str(refused)
        assert sum(engine.alive for engine in engines) == 1

    try:
        rig.run(run())
    finally:
        for engine in engines:
            rig.run(engine.stop())
