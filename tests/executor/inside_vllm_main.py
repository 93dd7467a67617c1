"""What can only be asked in a process that has imported vLLM; answers as JSON. For `test_serving_probe`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from rose_executor import (
    counting_scheduler,
    engine_env,
    kept_half,
    kv_keeping,
    quota_scheduler,
    serving_arrivals,
    serving_probe,
    vllm_030,
)
from rose_executor.board import SERVING, BoardReader, HalfWriter, claim_quota
from rose_executor.board_states import ServingState

CONFIG = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=101, block_size=32))


def clashes() -> list[str]:
    """Names that our schedulers and vLLM's both give to something."""
    ours, theirs = set(), set(dir(AsyncScheduler))
    for mixin in (counting_scheduler.Counting, kv_keeping.Keeping, quota_scheduler.QuotaKeeping):
        ours |= {name for name in vars(mixin) if not name.startswith("__")}
        ours |= set(re.findall(r"self\.(\w+)(?:: .+)? = ", inspect.getsource(mixin)))
    theirs |= set(re.findall(r"self\.(\w+)(?:: .+)? = ", inspect.getsource(AsyncScheduler.__mro__[1])))
    return sorted(ours & theirs)


def report(tokens: int = 3, prompt_tokens: int = 40) -> tuple[SchedulerStats, IterationStats]:
    """One step's statistics: two requests run, three wait."""
    iteration = IterationStats()
    iteration.num_generation_tokens = tokens
    iteration.prompt_token_stats.computed = prompt_tokens
    iteration.time_to_first_tokens_iter = [0.5]
    return SchedulerStats(2, 1, 2, kv_cache_usage=0.25), iteration


async def inert(path: Path) -> Any:
    probe = serving_probe.ServingProbe(CONFIG)
    probe.log_engine_initialized()
    probe.record(*report())
    return [probe.off, path.exists(), len(asyncio.all_tasks())]


async def second_engine(path: Path) -> Any:
    claim_quota(path)
    probe = serving_probe.ServingProbe(CONFIG, engine_index=1)
    probe.record(*report())
    return [probe.off, read(path)]


async def tells(path: Path) -> Any:
    claim_quota(path)
    probe = serving_probe.ServingProbe(CONFIG)
    probe.log_engine_initialized()
    idle = read(path)
    probe.record(*report())
    probe.record(None, None)
    busy = read(path)
    await asyncio.sleep(0.3)
    return [probe.off, idle, busy, read(path) == busy]


async def hears_of_arrivals(path: Path) -> Any:
    """Requests through the middleware: what the board says while they are there, and after them."""
    claim_quota(path)
    probe = serving_probe.ServingProbe(CONFIG)
    probe.log_engine_initialized()
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = BoardReader(path).read(SERVING, time.monotonic()).state
        seen.append([state.arrivals, state.unanswered, 0 < time.monotonic() - state.oldest_unanswered_at_s < 60])
        if scope["path"].endswith("refused/v1/completions"):
            raise ValueError("refused")

    arrivals = serving_arrivals.Arrivals(app)
    for kind, method, name in (
        ("http", "POST", "/v1/chat/completions"),
        ("http", "POST", "/prefix/v1/completions"),
        ("http", "GET", "/health"),
        ("http", "POST", "/tokenize"),
        ("lifespan", "", ""),
    ):
        await arrivals({"type": kind, "method": method, "path": name}, None, None)
    with contextlib.suppress(ValueError):
        await arrivals({"type": "http", "method": "POST", "path": "/refused/v1/completions"}, None, None)
    await asyncio.sleep(0.2)
    state = BoardReader(path).read(SERVING, time.monotonic()).state
    return [probe.off, seen, [state.arrivals, state.unanswered, state.idle]]


async def finds_a_late_board(path: Path) -> Any:
    probe = serving_probe.ServingProbe(CONFIG)
    probe.record(*report())
    before = path.exists()
    claim_quota(path)
    await asyncio.sleep(0.3)
    found = read(path)
    path.unlink()
    claim_quota(path)
    await asyncio.sleep(0.3)
    return [probe.off, before, found, read(path)]


async def no_board_to_be_had(path: Path) -> Any:
    """A folder that is missing, a file system that takes nothing, somebody else's file, another engine's half."""
    theirs, taken = path.with_name("theirs"), path.with_name("taken")
    theirs.write_text("not a board")
    claim_quota(taken)
    first = HalfWriter(taken, SERVING)
    said: list[Any] = []
    for place in (path / "missing" / "board", Path("/proc/version"), path.parent, theirs, taken):
        os.environ[engine_env.SERVING_BOARD] = str(place)
        with warnings() as warned:
            probe = serving_probe.ServingProbe(CONFIG)
            probe.log_engine_initialized()
            for _ in range(3):
                probe.record(*report())
                await asyncio.sleep(0.1)  # it looks for the board twice in that time
        said.append([probe.off, bool(probe.half.boardless), warned])
    first.close()
    await asyncio.sleep(0.3)
    return [said, theirs.read_text(), read(taken)]


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    serving_probe._log.addHandler(handler)
    try:
        yield said
    finally:
        serving_probe._log.removeHandler(handler)


async def odd_statistics(path: Path) -> Any:
    claim_quota(path)
    probe = serving_probe.ServingProbe(CONFIG)
    probe.record(object(), object())
    probe.record(*report())
    return [probe.off, read(path)]


async def slow_file_system(path: Path, write_s: float = 0.001) -> Any:
    """Steps of 10 ms on a clock of the test's own, and a board on which each write takes a while of it."""
    claim_quota(path)
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s)
    real, serving_probe.time = serving_probe.time, clock  # type: ignore[assignment]
    try:
        probe = serving_probe.ServingProbe(CONFIG)
        probe.log_engine_initialized()
        write = probe.half._writer.write

        def slowly(state: ServingState) -> None:
            nonlocal now_s
            now_s += write_s
            write(state)

        probe.half._writer.write = slowly
        steps = 0
        while not probe.off and steps < 2000:
            now_s += 0.01 - write_s
            probe.record(*report())
            steps += 1
        return [probe.off, steps]
    finally:
        serving_probe.time = real


async def quick_file_system(path: Path) -> Any:
    return await slow_file_system(path, write_s=0.0004)


async def full_disk(path: Path, *, at_start: bool = True) -> Any:
    """A board on which no write succeeds for a while, from the start on or later."""
    claim_quota(path)
    real, attempts, full = HalfWriter.write, list[float](), at_start

    def write(writer: HalfWriter[ServingState], state: ServingState) -> None:
        if full:
            attempts.append(time.monotonic())
            raise OSError(28, "No space left on device")
        real(writer, state)

    HalfWriter.write = write  # type: ignore[method-assign, assignment]
    try:
        with warnings() as warned:
            probe = serving_probe.ServingProbe(CONFIG)
            probe.log_engine_initialized()
            probe.record(*report())
            full = True
            began_s = time.monotonic()
            while time.monotonic() < began_s + 0.6:
                probe.record(*report())
                await asyncio.sleep(0.001)
            said = [probe.off, probe.half.boardless, len(warned), warned[-1]]
            # One that a step made, at most, and those of the beats.
            rare = all(later - earlier > 0.9 * kept_half.WRITE_AGAIN_S for earlier, later in pairwise(attempts))
            full = False
            while probe.half.boardless and time.monotonic() < began_s + 30.0:
                await asyncio.sleep(0.01)
            probe.record(*report())
            return [*said, rare, len(attempts) >= 2, probe.off, probe.half.boardless, read(path)[1:], len(warned)]
    finally:
        HalfWriter.write = real  # type: ignore[method-assign]


async def disk_that_fills(path: Path) -> Any:
    return await full_disk(path, at_start=False)


def read(path: Path) -> Any:
    reading = BoardReader(path).read(SERVING, time.monotonic())
    state = reading.state
    if state is None:
        return reading.why
    requests = [state.running, state.waiting, state.decoding, state.unanswered]
    return [state.steps, *requests, state.step_tokens, state.kv_blocks_used, state.kv_blocks_total]


def asked(scenario: Callable[[Path], Awaitable[Any]], folder: Path, *, named: bool = True) -> Any:
    path = folder / scenario.__name__
    os.environ.pop(engine_env.SERVING_BOARD, None)
    if named:
        os.environ[engine_env.SERVING_BOARD] = str(path)

    async def run() -> Any:
        return await scenario(path)

    return asyncio.run(run())


if __name__ == "__main__":
    answers = Path(sys.argv[1])
    vllm_030.level_engine()
    kept_half.LOOK_AGAIN_S = 0.05
    kept_half.WRITE_AGAIN_S = 0.2
    scenarios = (
        *(second_engine, tells, hears_of_arrivals, finds_a_late_board, no_board_to_be_had, odd_statistics),
        *(full_disk, disk_that_fills, slow_file_system, quick_file_system),
    )
    said: dict[str, Any] = {
        "clashes": clashes(),
        "inert": asked(inert, answers.parent, named=False),
        **{scenario.__name__: asked(scenario, answers.parent) for scenario in scenarios},
    }
    answers.write_text(json.dumps(said))
