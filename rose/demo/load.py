"""The load on the serving engine: one part of a trace, replayed by clients of their own, one after the other.

Invariants
- Each replay is the same requests, of the same lengths, at the same times; only what they meet is different.
- No two replays have a prompt in common: the engine's prefix cache would know it.
- A replay's file stands whatever ends its client. One that dies costs its own last records, and the next one begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rose.demo.child import DemoChild, Program, start_child
from rose.demo.cores import Placing
from rose.errors import ClusterError, ConfigError, DeadlineExceeded
from rose.logs import logger
from rose.waits import WaitBoard
from rose.workload.record_file import RecordReader, Replay, read_replay
from rose.workload.scaling import Scaling

log = logger("load")

NAME = "load"
DEATHS_MAX = 3
_END_S = 15.0
_BEGIN_S = 120.0
_POLL_S = 0.05
MARGIN_S = 180.0
"""What a replay may take beyond the part's own length: its client's start, and the last answers."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which part of which trace. Prompts are made of `token_ids` (LOW:HIGH)."""

    trace: str
    scaling: Scaling
    token_ids: str

    def arguments(self, url: str, records: Path, replay: int) -> tuple[str, ...]:
        """Of `load_main`. What the scaling leaves out is left out."""
        scaling = self.scaling
        given = {
            "--spread-s": scaling.spread_s,
            "--window-s": scaling.window_s,
            "--start-s": scaling.start_s,
            "--rate-rps": scaling.rate_rps,
            "--keep-s": scaling.keep_s,
            "--prompt-scale": scaling.prompt_scale,
            "--output-scale": scaling.output_scale,
            "--context": scaling.context_tokens,
            "--seed": scaling.seed,
            "--replay-number": replay,
        }
        options = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        return ("--url", url, "--records", str(records), "--trace", self.trace, "--token-ids", self.token_ids, *options)


@dataclass(slots=True)
class LoadClients:
    """Starts one client after the other, for a part of `length_s` seconds each.

    `told` is given the state and a word on it, `at` where one is scraped.
    """

    plan: LoadPlan
    length_s: float
    url: str
    folder: Path
    placing: Placing
    waits: WaitBoard
    told: Callable[[str, str], None]
    at: Callable[[str], None]
    files: list[Path] = field(default_factory=list)
    _client: DemoChild | None = None
    _deaths: int = 0

    async def alone(self) -> Replay:
        """The first replay. Raises ClusterError if its client does not come to its end, DeadlineExceeded."""
        path = self.folder / "alone.jsonl"
        await self._in_time(path)
        replay = read_replay(path)
        assert self._client is not None
        if replay.end is None or self._client.exit_code != 0:
            raise ClusterError(f"the load client {self._client.death()}", to_do="start the demo again")
        return replay

    async def again(self) -> None:
        """Replay for ever. Raises ClusterError when clients died or hung more often than `DEATHS_MAX` times."""
        while True:
            path = self.folder / f"shared-{len(self.files) + 1}.jsonl"
            self.files.append(path)
            try:
                await self._in_time(path)
            except DeadlineExceeded as error:
                self._died(f"hung: {error.what}")
                continue
            assert self._client is not None
            if self._client.exit_code != 0:
                self._died(self._client.death())

    async def stop(self) -> None:
        """End the client that runs, if one does; its file then says so."""
        if self._client is not None:
            await self._client.stop(_END_S)

    def replays(self) -> list[Replay]:
        """All but the first, as far as they came."""
        found = []
        for path in self.files:
            try:
                found.append(read_replay(path))
            except ConfigError as error:
                log.warning("a replay left no records", path=str(path), why=str(error))
        return found

    async def _in_time(self, path: Path) -> None:
        limit_s = self.length_s + MARGIN_S
        await self.waits.within(self._replay(path), "end of the replay", NAME, limit_s, boundary="cluster")

    async def _replay(self, path: Path) -> None:
        arguments = self.plan.arguments(self.url, path, len(self.files))
        program = Program(NAME, "rose.workload.load_main", arguments, self.folder / "load.log")
        self._client = await start_child(program, self.placing.with_load, self.waits)
        try:
            self.told("starting", path.stem)
            self.at(await self._metrics_url(self._client, path))
            self.told("replaying", path.stem)
            await self._client.wait()
            self.told("ended", path.stem)
        finally:
            await self._client.stop(_END_S)

    async def _metrics_url(self, client: DemoChild, path: Path) -> str:
        """From the first line of its file; "" if it ended before there was one."""
        return await self.waits.within(
            self._first_line(client, path), "first line of its records", NAME, _BEGIN_S, boundary="cluster"
        )

    async def _first_line(self, client: DemoChild, path: Path) -> str:
        while client.exit_code is None:
            if path.exists():
                reader = RecordReader(path)
                reader.read()
                if "metrics_url" in reader.replay.head:
                    return str(reader.replay.head["metrics_url"])
            await asyncio.sleep(_POLL_S)
        return ""

    def _died(self, how: str) -> None:
        self._deaths += 1
        log.warning("the load client died", how=how, deaths=self._deaths)
        if self._deaths > DEATHS_MAX:
            raise ClusterError(f"the load client died {self._deaths} times; the last {how}", to_do="see load.log")
