"""One event loop and one Ray for the tests of a run of pytest. Not a test module."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rose.trainer.cluster import local_cluster
from rose.trainer.rank import Rank
from rose.waits import WaitBoard

T = TypeVar("T")


class RaySite:
    """Its tests run on `run`'s loop. `logs` is the file that ranks log to."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.waits = WaitBoard()
        self.logs = folder / "log.jsonl"
        self._runner = runner
        self._count = 0
        self._opened = local_cluster(folder, "test", self.waits, 300.0)
        self.cluster = runner.run(self._opened.__aenter__())
        self.ray = self.cluster.ray

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def rank(self, name: str = "", at_once: int = 1) -> Rank:
        """Another one, not started."""
        self._count += 1
        return Rank(self.ray, name or f"thing-{self._count}", self.waits, logs=self.logs, at_once=at_once)

    def call(self, rank: Rank, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        return self.run(rank.call(method, *arguments, what=method, timeout_s=timeout_s))

    def close(self) -> None:
        self._runner.run(self._opened.__aexit__(None, None, None))
