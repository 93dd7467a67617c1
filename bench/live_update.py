"""An update of a live engine: the gap that it leaves in a running stream, the memory that it takes, what it costs.

A real vLLM engine on CPU with 151 million parameters in bfloat16, not packed, and versions of which 1 % differs. Each
of the updates comes into the middle of a stream of its own; figures are medians over `UPDATES` of a kind.

    pause_ms                  the longest time between two tokens of the stream around the commit; its keys and values
                              are kept
    recompute_pause_ms        the same where the stream recomputes its context, of about 90 tokens
    quiet_gap_ms              the same without an update: the longest of as many gaps, on a stream alone
    stage_gap_ms              the same while the version is staged beside it
    peak_extra_bytes          over all processes of the engine, above what they held before the update
    unpacked_cost_batch_N     seconds per token of an engine that can be updated, over those of one with packed weights
    dense_pause_ms            `pause_ms` of an update that overwrites every weight
    parity_max                largest difference of a log-prob from an engine started from the last version's folder
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp

from bench.live_model import Line, build
from bench.registry import BenchFailed
from bench.result import Run
from rose.errors import RoseError
from rose.processes import family
from rose.waits import WaitBoard
from rose_executor.engine_process import EngineProcess
from rose_executor.engine_settings import EngineSettings
from rose_executor.fresh_probe import compare, probe_live
from rose_executor.token_route import TokenRoute, open_session
from rose_executor.warm_process import WarmProcess
from rose_transfer import snapshot

UPDATES = 8
STREAM_TIMEOUT_S = 120
QUIET_TOKENS = 160
STREAM_TOKENS_MAX = 960
BEFORE_TOKENS, AFTER_TOKENS = 40, 20
"""Of a stream, before an update begins and after it."""
BATCHES = (1, 8)
PROMPT = tuple(range(10, 42))
PREFIXES = [[(7 + 11 * i + 3 * j) % 384 for j in range(24)] for i in range(4)]


def measure() -> Run:
    """One round on fresh engines. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="rose-live-") as folder:
        try:
            return asyncio.run(_Round(Path(folder)).run())
        except RoseError as error:
            raise BenchFailed(f"the live engine: {error}") from error


@dataclass(slots=True)
class _Stream:
    """When the tokens of one request came, on the clock of the machine."""

    arrivals_s: list[float] = field(default_factory=list)

    def take(self, ids: Sequence[int]) -> None:
        self.arrivals_s += [time.monotonic()] * len(ids)

    async def until(self, tokens: int) -> None:
        async with asyncio.timeout(STREAM_TIMEOUT_S):
            while len(self.arrivals_s) < tokens:
                await asyncio.sleep(0.001)

    def longest_ms(self, begin_s: float, end_s: float) -> float:
        """The longest gap of which a part lies between two times."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((b - a for a, b in pairs if b >= begin_s and a <= end_s), default=0.0) * 1e3


class _Round:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waits = WaitBoard()
        self._requests = 0

    async def run(self) -> Run:
        model = build(self._folder / "model")
        line = Line(self._folder / "store", model)
        async with AsyncExitStack() as stack:
            self._warm = await WarmProcess.start(self._waits, log_path=self._folder / "warm.log")
            stack.push_async_callback(self._warm.close)
            self._session = await stack.enter_async_context(open_session())
            live = await self._engine(stack, "live", model)
            packed = await self._engine(stack, "packed", model, unpacked_weights=False)
            figures = await self._costs(live, packed)
            await packed.stop()
            figures |= await self._updates(live, line)
            figures["dense_pause_ms"] = (await self._update(live, line, line.way(None)))[0]
            folder = snapshot.write(self._folder / "versions", line.newest, line.weights, model)
            fresh = await self._engine(stack, "fresh", folder.path, version=line.newest)
            figures["parity_max"] = compare(
                await probe_live(self._route(live), PREFIXES, request_prefix="live"),
                await probe_live(self._route(fresh), PREFIXES, request_prefix="fresh"),
            )
        return figures

    async def _engine(
        self, stack: AsyncExitStack, name: str, model: Path, *, version: int = 0, unpacked_weights: bool = True
    ) -> EngineProcess:
        settings = EngineSettings(
            engine_id=name,
            model_dir=model,
            runtime_dir=self._folder,
            log_path=self._folder / f"{name}.log",
            dtype="bfloat16",
            max_num_seqs=16,
            stream_interval=1,
            unpacked_weights=unpacked_weights,
        )
        engine = EngineProcess(settings, self._warm, self._waits)
        await engine.start(version)
        stack.push_async_callback(engine.stop)
        return engine

    def _route(self, engine: EngineProcess) -> TokenRoute:
        session: aiohttp.ClientSession = self._session
        return TokenRoute(engine.base_url, session, engine_id=engine.settings.engine_id, waits=self._waits)

    async def _stream(self, engine: EngineProcess, tokens: int) -> _Stream:
        self._requests += 1
        stream = _Stream()
        await self._route(engine).generate(
            f"bench-{self._requests}",
            PROMPT,
            max_tokens=tokens,
            temperature=0.0,
            stop_token_ids=(),
            on_tokens=stream.take,
        )
        return stream

    async def _costs(self, live: EngineProcess, packed: EngineProcess) -> dict[str, float | None]:
        """Engines take turns."""
        figures: dict[str, float | None] = {}
        for size in BATCHES:
            seconds: dict[str, list[float]] = {"live": [], "packed": []}
            for _ in range(3):
                for name, engine in (("live", live), ("packed", packed)):
                    began_s = time.monotonic()
                    await asyncio.gather(*(self._stream(engine, 48) for _ in range(size)))
                    seconds[name].append((time.monotonic() - began_s) / (48 * size))
            figures[f"unpacked_cost_batch_{size}"] = median(seconds["live"]) / median(seconds["packed"])
        return figures

    async def _updates(self, live: EngineProcess, line: Line) -> dict[str, float | None]:
        kept: list[tuple[float, ...]] = []
        recomputed: list[float] = []
        quiet: list[float] = []
        for _ in range(UPDATES):
            kept.append(await self._update(live, line, line.advance(), keep_kv=True))
            recomputed.append((await self._update(live, line, line.advance()))[0])
            quiet.append((await self._stream(live, QUIET_TOKENS)).longest_ms(0, time.monotonic()))
        names = ("pause_ms", "stage_gap_ms", "stage_s", "engine_pause_ms", "load_ms", "peak_extra_bytes")
        columns = [median(column) for column in zip(*kept, strict=True)]
        return {
            **dict(zip(names, columns, strict=True)),
            "pause_ms_max": max(row[0] for row in kept),
            "recompute_pause_ms": median(recomputed),
            "quiet_gap_ms": median(quiet),
        }

    async def _update(
        self, live: EngineProcess, line: Line, way: list[tuple[str, bool]], *, keep_kv: bool = False
    ) -> tuple[float, ...]:
        stream = _Stream()
        self._requests += 1
        request = asyncio.create_task(
            self._route(live).generate(
                f"bench-{self._requests}",
                PROMPT,
                max_tokens=STREAM_TOKENS_MAX,
                temperature=0.0,
                stop_token_ids=(),
                on_tokens=stream.take,
            )
        )
        await stream.until(BEFORE_TOKENS)
        watch = _Memory(live.pid)
        staging_s = time.monotonic()
        await live.control.stage(line.newest, line.store.folder / "objects", way)
        staged_s = time.monotonic()
        committed = await live.control.commit(line.newest, keep_kv=keep_kv)
        done_s = time.monotonic()
        extra_bytes = watch.peak_extra_bytes()
        if request.done():
            raise BenchFailed("the stream ended before the update", to_do="stream more tokens")
        await stream.until(len(stream.arrivals_s) + AFTER_TOKENS)
        request.cancel()
        await asyncio.wait([request])
        return (
            stream.longest_ms(staged_s, done_s),
            stream.longest_ms(staging_s, staged_s),
            staged_s - staging_s,
            committed.pause_ms,
            committed.load_ms,
            extra_bytes,
        )


class _Memory:
    """The resident memory of a tree of processes, from now on. Source: Linux, `clear_refs` and `VmHWM` in /proc."""

    def __init__(self, pid: int) -> None:
        self._before: dict[int, int] = {}
        for process in family(pid):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            self._before[process.pid] = _status_bytes(process.pid, "VmRSS")

    def peak_extra_bytes(self) -> float:
        return float(sum(_status_bytes(pid, "VmHWM") - before for pid, before in self._before.items()))


def _status_bytes(pid: int, name: str) -> int:
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith(f"{name}:"):
            return int(row.split()[1]) * 1024
    raise BenchFailed(f"process {pid} has no {name}")
