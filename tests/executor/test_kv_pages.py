"""Free blocks whose pages go back: over vLLM's own pool and real memory; and since when an engine is idle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rose_executor.kv_pages import IDLE_KEEPS_S, Idleness
from rose_executor.launcher import Command


@pytest.mark.engine
def test_whatever_is_asked_of_the_pool_no_block_loses_what_is_in_it(rig: Any, tmp_path: Path) -> None:
    async def ask() -> None:
        log = tmp_path / "log"
        child = await rig.warm.launch(Command("kv_pages_main", ("60",), log, tmp_path))
        assert await asyncio.wait_for(child.wait(), 120) == 0, log.read_text()[-3000:]

    rig.run(ask())


def test_an_engine_begins_with_nothing_worth_keeping() -> None:
    assert Idleness().lasts(0.0)


def test_without_requests_for_a_while_prefixes_are_kept_no_more() -> None:
    idle = Idleness()
    idle.saw(1, 10.0)
    assert not idle.lasts(100.0)
    idle.saw(0, 100.0)
    idle.saw(0, 101.0)
    assert not idle.lasts(100.0 + IDLE_KEEPS_S - 0.1)
    assert idle.lasts(100.0 + IDLE_KEEPS_S)
    idle.saw(1, 200.0)
    idle.saw(0, 201.0)
    assert not idle.lasts(201.0)
