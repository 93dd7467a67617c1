"""Proves after an update that the live engine is what a fresh engine would be.

Invariants
- The live engine is asked before anything else runs under the new version; the same prefixes are asked every time, so
  keys and values computed under an older version would be found if an update left any behind.
- A fresh engine loads the published folder from disk, in a process of its own: it shares nothing with the live one.
- Tokens of the live probe are booked like any other, as evaluation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rose.errors import ContractError, EngineError
from rose.ledger import Account
from rose.logs import logger
from rose.trainer.books import Books
from rose.trainer.engine_versions import EngineVersions
from rose.trainer.recorder import Recorder
from rose.waits import WaitBoard
from rose_executor.fresh_probe import ProbeScores, compare, probe_live
from rose_executor.supervisor import EngineSupervisor
from rose_executor.token_route import EngineLost

log = logger("parity")

_ATTEMPTS = 3
_END_S = 10.0


def probe_prefixes(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Every prompt, whole and cut after a quarter, a half and three quarters of its tokens."""
    return [list(prompt[: max(1, len(prompt) * quarter // 4)]) for prompt in prompts for quarter in (1, 2, 3, 4)]


class ParityCheck:
    """Compares live and fresh log-probs of `prefixes`; at most one comparison is open.

    `score_fresh` starts an engine on a version folder, scores the same prefixes, and ends it.
    """

    def __init__(
        self,
        prefixes: list[list[int]],
        tolerance: float,
        supervisor: EngineSupervisor,
        engine_versions: EngineVersions,
        score_fresh: Callable[[Path, list[list[int]]], Awaitable[ProbeScores]],
        books: Books,
        recorder: Recorder,
        waits: WaitBoard,
    ) -> None:
        self._prefixes = prefixes
        self._tolerance = tolerance
        self._supervisor = supervisor
        self._engine_versions = engine_versions
        self._score_fresh = score_fresh
        self._books = books
        self._recorder = recorder
        self._waits = waits
        self._open: asyncio.Task[None] | None = None

    async def start(self, version: int) -> None:
        """Ask the live engine now, and a fresh one in the background. First waits for the comparison before.

        Raises ContractError if that one failed.
        """
        await self.finish()
        live = await self._ask_live(version)
        self._open = asyncio.create_task(self._prove(version, live), name=f"parity of version {version}")

    async def finish(self) -> None:
        """Wait for the open comparison. Raises ContractError if live and fresh engine differ."""
        if self._open is not None:
            proof, self._open = self._open, None
            await proof

    async def cancel(self) -> None:
        """Drop the open comparison: the run ends."""
        if self._open is not None:
            self._open.cancel()
            with self._waits.waiting("end of the comparison", "fresh engine", _END_S):
                await asyncio.wait([self._open], timeout=_END_S)
            self._open = None

    async def _prove(self, version: int, live: ProbeScores) -> None:
        with self._recorder.during("parity", background=True):
            async with self._engine_versions.held(version, "parity") as snapshot:
                fresh = await self._score_fresh(snapshot.path, self._prefixes)
        difference = compare(live, fresh)
        self._recorder.parity(version, difference)
        if difference > self._tolerance:
            raise ContractError(
                f"after version {version} the live engine's log-probs differ from a fresh engine's by {difference:.2e}",
                expected=f"at most {self._tolerance:.0e} (weights.parity_tolerance)",
                to_do="do not trust this run; report it with its log",
            )

    async def _ask_live(self, version: int) -> ProbeScores:
        probe_id = f"p{version}"
        self._books.open_trajectory(probe_id)
        for attempt in range(_ATTEMPTS):
            engine = await self._supervisor.ready()
            prefix = f"{probe_id}.{attempt}"
            request_ids = [f"{prefix}-{index}" for index in range(len(self._prefixes))]
            for request_id in request_ids:
                self._books.start_request(request_id, probe_id, engine)
            try:
                scores = await probe_live(engine.route, self._prefixes, request_prefix=prefix)
            except EngineLost as lost:
                log.warning("probe is repeated", version=version, why=lost.what)
                for request_id in request_ids:
                    self._books.end_request(request_id, 0, (await engine.final_request(request_id)).tokens)
                await engine.news_of_death()
                continue
            for request_id in request_ids:
                self._books.end_request(request_id, 1)
            self._books.settle(probe_id, Account.EVALUATION)
            return scores
        raise EngineError(f"the probe of version {version} was lost {_ATTEMPTS} times", to_do="see the engine's log")
