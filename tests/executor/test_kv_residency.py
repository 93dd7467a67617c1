"""Prefixes that are kept: over vLLM's own pool at random, and in a real engine that has not enough memory for all."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rose_executor.keep_prefix import Keep
from rose_executor.launcher import Command
from rose_executor.token_route import TokenRoute

pytestmark = [pytest.mark.engine, pytest.mark.each_vllm]

BLOCK_BYTES, BLOCK_TOKENS = 16 * 1024, 32
WHOLE = 10 * BLOCK_TOKENS
PROMPT_TOKENS = WHOLE + 3
BLOCKS = 50


def test_whatever_is_asked_of_the_queue_its_books_are_right(rig: Any, tmp_path: Path) -> None:
    async def ask() -> None:
        log = tmp_path / "log"
        child = await rig.warm.launch(Command("kv_residency_main", ("60",), log, tmp_path))
        assert await asyncio.wait_for(child.wait(), 120) == 0, log.read_text()[-3000:]

    rig.run(ask())


def test_a_scheduler_keeps_what_was_answered_and_may_be_found_again_for_as_long_as_it_was_asked(
    rig: Any, tmp_path: Path
) -> None:
    async def ask() -> None:
        log = tmp_path / "log"
        child = await rig.warm.launch(Command("residing_main", (), log, tmp_path))
        assert await asyncio.wait_for(child.wait(), 120) == 0, log.read_text()[-3000:]

    rig.run(ask())


class Engine:
    """One with room for four prompts and some blocks. `found` counts the tokens of prompts that were in its cache."""

    def __init__(self, rig: Any) -> None:
        self._rig = rig
        self._engine = rig.new_engine("residing", kv_cache_bytes=BLOCKS * BLOCK_BYTES)

    async def __aenter__(self) -> Engine:
        await self._engine.start(0)
        self._route = TokenRoute(self._engine.base_url, self._rig.session, waits=self._rig.waits)
        self._asked = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()

    async def turn(self, name: int, keep: Keep | None = None) -> None:
        prompt = [name % 90, name // 90, *([7] * (PROMPT_TOKENS - 2))]
        self._asked += 1
        await self._route.generate(
            f"request-{self._asked}", prompt, max_tokens=2, temperature=0.0, stop_token_ids=(), keep=keep
        )

    async def found(self) -> float:
        """Once the engine has told of all that it was asked."""
        async with asyncio.timeout(30):
            while True:
                async with self._rig.session.get(f"{self._engine.base_url}/metrics") as response:
                    text = await response.text()
                told = re.findall(r"^vllm:prefix_cache_(queries|hits)_total\{.*\} (.*)$", text, re.MULTILINE)
                figures = {name: float(figure) for name, figure in told}
                if figures["queries"] == self._asked * PROMPT_TOKENS:
                    return figures["hits"]
                await asyncio.sleep(0.02)

    async def hit_tokens(self, name: int, keep: Keep | None = None) -> int:
        """What a turn finds in the cache."""
        before = await self.found()
        await self.turn(name, keep)
        return round(await self.found() - before)


def test_a_prefix_that_is_kept_is_found_again_and_others_are_not(rig: Any) -> None:
    async def run() -> None:
        async with Engine(rig) as engine:
            await engine.turn(1, Keep("one", 5, 600.0))
            await engine.turn(2)
            for other in range(10, 20):
                await engine.turn(other)
            assert await engine.hit_tokens(2) == 0
            assert await engine.hit_tokens(1, Keep("one", 5, 600.0)) == WHOLE
            # Now there is more to keep than there is memory: of the lowest rank all, of a high one nothing.
            for other in range(20, 30):
                await engine.turn(other, Keep(f"t{other}", other, 600.0))
            assert await engine.hit_tokens(1, Keep("one", 5, 600.0)) == WHOLE
            assert await engine.hit_tokens(20) == WHOLE
            assert await engine.hit_tokens(25) == 0

    rig.run(run())


def test_what_is_over_or_out_of_time_makes_room(rig: Any) -> None:
    async def run() -> None:
        async with Engine(rig) as engine:
            await engine.turn(1, Keep("one", 1, 600.0))
            await engine.turn(2, Keep("two", 2, 1e-3))
            await engine.turn(3, Keep("three", 3, 600.0))
            await engine.turn(4, Keep(forget=("one", "nobody")))
            for other in range(10, 14):
                await engine.turn(other)
            assert await engine.hit_tokens(1) == 0
            assert await engine.hit_tokens(3) == WHOLE

    rig.run(run())
