"""The driver of the token ledger: who still owes it an event, and how a run that stops early pays.

Invariants
- Every opened trajectory is settled once, every started request ended once; whatever is still open when the run
  stops is closed by `close`, with the engines' own counts, so the accounts add up after a crash or an interrupt too.
"""

from __future__ import annotations

import time
from typing import Protocol

from rose.ledger import (
    Account,
    EngineCounted,
    LedgerEvent,
    Opened,
    Received,
    RequestEnded,
    RequestStarted,
    Settled,
    TokenLedger,
)


class CountedEngine(Protocol):
    """One incarnation of an engine, as far as its token page is concerned; readable after its death."""

    @property
    def engine_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    def total_tokens(self) -> int:
        """Tokens generated since the incarnation started."""
        ...

    def request_tokens(self, request_id: str) -> int:
        """Tokens generated for one request, 0 if the engine never sampled for it."""
        ...


class Books:
    """Books trajectories and requests, and reads the pages of every incarnation it has seen."""

    def __init__(self) -> None:
        self.ledger = TokenLedger()
        self._engines: dict[tuple[str, str], CountedEngine] = {}
        self._requests: dict[str, CountedEngine] = {}
        self._trajectories: set[str] = set()

    def watch(self, engine: CountedEngine) -> None:
        """From now on the page of this incarnation counts."""
        self._engines[engine.engine_id, engine.incarnation] = engine

    def open_trajectory(self, trajectory_id: str) -> None:
        self._trajectories.add(trajectory_id)
        self._book(Opened(trajectory_id))

    def start_request(self, request_id: str, trajectory_id: str, engine: CountedEngine) -> None:
        self._requests[request_id] = engine
        self._book(RequestStarted(request_id, trajectory_id, engine.engine_id))

    def end_request(self, request_id: str, received_tokens: int, generated_tokens: int | None = None) -> None:
        """`generated_tokens` is the engine's own count after a broken stream, None after a clean finish."""
        del self._requests[request_id]
        self._book(Received(request_id, received_tokens))
        self._book(RequestEnded(request_id, generated_tokens))

    def settle(self, trajectory_id: str, account: Account) -> None:
        self._trajectories.discard(trajectory_id)
        self._book(Settled(trajectory_id, account))

    def read_pages(self) -> None:
        """Take in the engines' counts as of now."""
        for engine in self._engines.values():
            self._book(EngineCounted(engine.engine_id, engine.incarnation, engine.total_tokens()))

    def close(self) -> None:
        """Close whatever an early stop left open. Call when every engine has ended, so that its page is final."""
        for request_id, engine in list(self._requests.items()):
            self.end_request(request_id, 0, engine.request_tokens(request_id))
        for trajectory_id in sorted(self._trajectories):
            self.settle(trajectory_id, Account.ABORTED)
        self.read_pages()

    def _book(self, event: LedgerEvent) -> None:
        self.ledger.step(event, time.monotonic())
