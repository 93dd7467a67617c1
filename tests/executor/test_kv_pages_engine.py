"""A real guest gives its pages back and gets them again, in mid-generation, and computes what it would have anyway."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_quota_scheduler import PROMPTS, Guest, greedy, usage_falls_to

from rose.processes import family
from rose_executor.board_states import Quota
from rose_executor.guest_memory import host_memory

pytestmark = pytest.mark.engine

MIB = 2**20
CACHE = 32 * MIB
BLOCKS = 2047
"""Of 16 KiB each, one less for the null block."""
TOKENS = 300
WHOLE = Quota(kv_blocks=BLOCKS, tokens_per_step=4096, active_seqs=16, gate_open=True)


class Memory:
    """What the guest holds, by the kernel's books."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def resident_bytes(self) -> int:
        return host_memory(self._guest.engine.pid).resident_bytes

    async def falls_to(self, most_bytes: float) -> None:
        async with asyncio.timeout(30):
            while self.resident_bytes() > most_bytes:
                await asyncio.sleep(0.02)

    async def filled(self) -> int:
        """Have requests pass through every block, so that cached prefixes fill the cache; what is resident then."""
        seeded = random.Random(5)
        route = self._guest.route()
        prompts = [[seeded.randrange(90) for _ in range(480)] for _ in range(BLOCKS // 14)]
        asked = (
            route.generate(f"fill-{index}", prompt, max_tokens=1, temperature=0.0, stop_token_ids=())
            for index, prompt in enumerate(prompts)
        )
        await asyncio.wait_for(asyncio.gather(*asked), 120)
        return self.resident_bytes()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def guest(request: pytest.FixtureRequest, rig: Any) -> Iterator[Guest]:
    path = rig.folder / f"pages-board-{request.param}"
    engine = rig.new_engine("guest", board=path, async_scheduling=request.param, kv_cache_bytes=CACHE)
    made = Guest(rig, engine, path)
    rig.run(engine.start(0))
    yield made
    rig.run(engine.stop())


def allowed(kv_blocks: int, tokens_per_step: int = 4096, gate_open: bool = True) -> Quota:
    return Quota(kv_blocks, tokens_per_step, active_seqs=16, gate_open=gate_open)


def test_it_says_what_gives_its_memory_back(guest: Guest) -> None:
    lines = (guest.rig.folder / "guest.log").read_text().splitlines()
    # Other tests' guests may have written to the same file; the last to start is this one.
    *_, told = (json.loads(line) for line in lines if '"keys and values"' in line and line.startswith("{"))
    assert (told["name"], "16384 bytes" in told["goes_back"]) == ("madvise", True)


def test_a_guest_that_starts_takes_no_memory_for_its_cache(rig: Any) -> None:
    """By the kernel's books it was never larger than one whose cache is sixteen times smaller."""
    peaks = []
    for cache in (16 * MIB, 256 * MIB):
        path = rig.folder / f"starting-board-{cache}"
        guest = Guest(rig, rig.new_engine("starting", board=path, kv_cache_bytes=cache), path)
        rig.run(guest.engine.start(0))
        peaks.append(sum(map(peak_bytes, family(guest.engine.pid))))
        rig.run(guest.engine.stop())
    assert peaks[1] < peaks[0] + 120 * MIB


def peak_bytes(process: psutil.Process) -> int:
    """The most that a process has ever had resident."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_an_idle_guest_keeps_its_prefixes_for_a_moment_and_then_holds_nothing(guest: Guest) -> None:
    async def run() -> None:
        memory = Memory(guest)
        async with guest.renewed():
            guest.give(WHOLE)
            await greedy(guest.route(), "warm")
            await memory.falls_to(memory.resident_bytes())
            before = memory.resident_bytes()
            full = await memory.filled()
            assert full > before + 0.8 * CACHE
            assert (await guest.until(lambda _: True)).kv_gives_back
            await memory.falls_to(full - 0.9 * CACHE)

    guest.rig.run(run())


@pytest.mark.parametrize("gate_open", [True, False], ids=["open", "shut"])
def test_a_cut_to_a_tenth_in_mid_generation_gives_pages_back_and_changes_no_token(
    guest: Guest, gate_open: bool
) -> None:
    """And so does the growth that follows, whether the guest computes meanwhile or stands behind its gate."""

    async def run() -> None:
        memory = Memory(guest)
        reference = await greedy(guest.rig.route(), f"reference-{guest.path.name}-{gate_open}", TOKENS)
        async with guest.renewed():
            guest.give(WHOLE)
            full = await memory.filled()
            streams = asyncio.create_task(greedy(guest.route(), f"cut-{gate_open}", TOKENS))
            await guest.until(lambda state: state.running == len(PROMPTS))
            # In steps of two tokens, so that much is left to do when all pages are back.
            cut = await guest.taken(allowed(BLOCKS // 10, tokens_per_step=2, gate_open=gate_open))
            assert cut.kv_blocks_used <= BLOCKS // 10
            await memory.falls_to(full - 0.8 * CACHE)
            assert not streams.done()
            none = await guest.taken(allowed(0, tokens_per_step=2, gate_open=gate_open))
            assert (none.kv_blocks_used, none.running) == (0, 0)
            await usage_falls_to(guest, 0.0)
            guest.give(WHOLE)
            assert await streams == reference

    guest.rig.run(run())


def test_budgets_that_change_at_random_change_no_token_and_leave_no_block_in_use(guest: Guest) -> None:
    seeded = random.Random(7)

    def drawn() -> Quota:
        return allowed(
            kv_blocks=seeded.choice((0, 9, 20, 40, 100, BLOCKS)),
            tokens_per_step=seeded.choice((1, 5, 64, 4096)),
            gate_open=seeded.random() < 0.8,
        )

    async def run() -> None:
        reference = await greedy(guest.rig.route(), f"undisturbed-{guest.path.name}")
        async with guest.renewed():
            guest.give(WHOLE)
            guest.seen.clear()
            for turn in range(3):
                streams = asyncio.create_task(greedy(guest.route(), f"random-{turn}"))
                for _ in range(50):
                    guest.give(drawn())
                    await asyncio.sleep(0.01)
                guest.give(WHOLE)
                assert await streams == reference
            idle = await guest.until(lambda state: not state.running and not state.waiting)
            assert idle.kv_blocks_used == 0
        assert len(guest.seen) > 50
        assert all(state.kv_blocks_used <= quota.kv_blocks for quota, state in guest.seen)

    guest.rig.run(run())


def test_a_neighbour_that_grows_and_shrinks_changes_nothing_about_a_guest_that_starts(rig: Any) -> None:
    """Its cache has the size that it was given: nothing is profiled, and pages that it does not need go back."""
    neighbour = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("neighbour_main.py")), "512"], stdout=subprocess.PIPE, text=True
    )
    path = rig.folder / "crowded-board"
    guest = Guest(rig, rig.new_engine("crowded", board=path, kv_cache_bytes=CACHE), path)

    async def run() -> None:
        await guest.engine.start(0)
        async with guest.renewed():
            guest.give(WHOLE)
            assert await greedy(guest.route(), "crowded") == await greedy(rig.route(), "alone")
            assert (await guest.until(lambda _: True)).kv_blocks_total == BLOCKS

    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "begins\n"
        rig.run(run())
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()
        rig.run(guest.engine.stop())
