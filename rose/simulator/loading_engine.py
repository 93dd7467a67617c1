"""A simulated engine that changes its weights shard by shard, may fail halfway, and dies.

Invariants
- It serves only while alive and not paused; it is paused for the whole of a commit, and stays paused after
  a failed one. One that it undoes leaves it as it was, serving.
- It obeys an order once and never one older than the last it saw: a repeated or late order does nothing.
- An incarnation gets no order that was meant for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose.driver.virtual import VirtualDriver
from rose.version_events import (
    Commit,
    CommitFailed,
    Committed,
    CommitUndone,
    Stage,
    Staged,
    StageFailed,
    VersionAction,
    VersionEvent,
)

SHARDS = 2
SHARD_S = 0.01
LINK_S = 0.005

Answer = Staged | StageFailed | Committed | CommitUndone | CommitFailed
VersionDriver = VirtualDriver[VersionEvent, VersionAction]


class LoadingEngine:
    """One incarnation. `stored` says whether a version can still be fetched, `answer` takes what it replies."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        version: int,
        driver: VirtualDriver[Any, Any],
        stored: Callable[[int], bool],
        answer: Callable[[LoadingEngine, Answer], None],
        fails: float,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.alive = True
        self.paused = False
        self.shards = [version] * SHARDS
        self.staged: int | None = None
        self._driver = driver
        self._stored = stored
        self._answer = answer
        self._fails = fails
        self._last_order = -1

    @property
    def serving(self) -> bool:
        return self.alive and not self.paused

    def order(self, order: Stage | Commit) -> None:
        """Send an order over the faulty link."""
        what = f"{self.incarnation} gets {type(order).__name__} {order.version} ({order.order})"
        self._driver.send(f"to {self.incarnation}", what, LINK_S, lambda: self._obey(order))

    def _obey(self, order: Stage | Commit) -> None:
        if not self.alive or order.order <= self._last_order:
            return
        self._last_order = order.order
        if isinstance(order, Stage):
            delay_s = 0.02 + self._driver.random.random() * 0.3
            self._driver.call(delay_s, f"{self.incarnation} has staged", lambda: self._stage(order))
        elif self.staged != order.version:
            why = f"{order.version} is not staged"
            self._reply(CommitFailed(order.engine_id, order.version, order.order, why))
        else:
            self.paused = True
            self._write_shard(order, 0, tuple(self.shards))

    def _stage(self, order: Stage) -> None:
        if not self.alive or order.order != self._last_order:
            return
        if self._unlucky() or not self._stored(order.version):
            self._reply(StageFailed(order.engine_id, order.version, order.order, "checksum"))
            return
        self.staged = order.version
        self._reply(Staged(order.engine_id, order.version, order.order))

    def _write_shard(self, order: Commit, shard: int, before: tuple[int, ...]) -> None:
        if not self.alive:
            return
        if shard == SHARDS:
            self._settled()
            self._reply(Committed(order.engine_id, order.version, order.order))
        elif self._unlucky():
            self._fail(order, f"shard {shard}", before)
        else:
            self.shards[shard] = order.version
            what = f"{self.incarnation} wrote shard {shard}"
            self._driver.call(SHARD_S, what, lambda: self._write_shard(order, shard + 1, before))

    def _fail(self, order: Commit, why: str, before: tuple[int, ...]) -> None:
        if self._unlucky():
            self._reply(CommitFailed(order.engine_id, order.version, order.order, why))
            return
        self.shards = list(before)
        self._settled()
        self._reply(CommitUndone(order.engine_id, order.version, order.order, why))

    def _settled(self) -> None:
        self.paused = False
        self.staged = None

    def _unlucky(self) -> bool:
        return self._driver.now < self._driver.faults.until_s and self._driver.random.random() < self._fails

    def _reply(self, answer: Answer) -> None:
        what = f"{self.incarnation} answers"
        self._driver.send(f"from {self.incarnation}", what, LINK_S, lambda: self._answer(self, answer))
