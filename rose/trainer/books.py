"""The driver of the token ledger: who still owes it an event, and how a run that stops early pays.

Invariants
- Every opened trajectory is settled once, every started request ended once; whatever is still open when the run
  stops is closed by `close`, with the engines' own counts, so the accounts add up after a crash or an interrupt too.
- Where an engine's own count cannot be had, what was received stands in for it, and that is said by name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
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


@dataclass(slots=True)
class Tally:
    """What came from one engine, over all its incarnations; `lost` of the `requests` did not come to their end."""

    lent: bool
    received: int = 0
    requests: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Watched:
    """An incarnation: what was booked on it, and on whose word."""

    engine: CountedEngine
    booked: int = 0
    on_trust: str = ""

    def total(self) -> int:
        counted = self.engine.total_tokens()
        return max(counted, self.booked) if self.on_trust else counted


_Key = tuple[str, str]


def _key(engine: CountedEngine) -> _Key:
    return (engine.engine_id, engine.incarnation)


class Books:
    """Books trajectories and requests, and reads the pages of every incarnation it has seen."""

    def __init__(self) -> None:
        self.ledger = TokenLedger()
        self.tallies: dict[str, Tally] = {}
        self._engines: dict[_Key, _Watched] = {}
        self._requests: dict[str, _Watched] = {}
        self._unsure: dict[str, tuple[_Watched, int]] = {}
        self._trajectories: set[str] = set()

    def watch(self, engine: CountedEngine, *, lent: bool = False) -> None:
        """From now on the page of this incarnation counts."""
        self._engines[_key(engine)] = _Watched(engine)
        self.tallies.setdefault(engine.engine_id, Tally(lent))

    def open_trajectory(self, trajectory_id: str) -> None:
        self._trajectories.add(trajectory_id)
        self._book(Opened(trajectory_id))

    def start_request(self, request_id: str, trajectory_id: str, engine: CountedEngine) -> None:
        """`engine` is one that is watched."""
        self._requests[request_id] = self._engines[_key(engine)]
        self.tallies[engine.engine_id].requests += 1
        self._book(RequestStarted(request_id, trajectory_id, engine.engine_id))

    def end_request(self, request_id: str, received_tokens: int, generated_tokens: int | None = None) -> None:
        """`generated_tokens` is the engine's own count after a broken stream, None after a clean finish."""
        watched = self._requests.pop(request_id)
        tally = self.tallies[watched.engine.engine_id]
        tally.received += received_tokens
        tally.lost += generated_tokens is not None
        watched.booked += received_tokens if generated_tokens is None else generated_tokens
        self._book(Received(request_id, received_tokens))
        self._book(RequestEnded(request_id, generated_tokens))

    def end_unsure(self, request_id: str, received_tokens: int, generated_tokens: int) -> None:
        """As `end_request`, of a broken stream whose engine may have generated more than is known: see `recount`."""
        self._unsure[request_id] = (self._requests[request_id], generated_tokens)
        self.end_request(request_id, received_tokens, generated_tokens)

    def unsettled(self, engine: CountedEngine) -> tuple[str, ...]:
        """Requests that were sent to this incarnation and are still open."""
        return tuple(each for each, watched in self._requests.items() if watched.engine is engine)

    def unsure(self, engine: CountedEngine) -> tuple[str, ...]:
        """Requests on this incarnation that were ended without its own count."""
        return tuple(each for each, (watched, _) in self._unsure.items() if watched.engine is engine)

    def recount(self, request_id: str, generated_tokens: int) -> None:
        """The engine's own count of a request that was ended without it."""
        watched, booked = self._unsure.pop(request_id)
        self._add_unreceived(watched, f"{request_id} (later)", generated_tokens - booked)

    def trust(self, engine: CountedEngine, why: str) -> bool:
        """The last counts of this incarnation cannot be had: what is booked on it stands for them.

        Whether that is so: where nothing is open and its last known total is what was booked, nothing is missing.
        """
        watched = self._engines[_key(engine)]
        missing = self.unsettled(engine) or self.unsure(engine) or engine.total_tokens() != watched.booked
        if missing:
            watched.on_trust = why
        return bool(missing)

    def trusted(self) -> tuple[str, ...]:
        """For each incarnation that tokens were booked on without its own last word, a line that says so."""
        return tuple(
            f"engine {engine_id}, incarnation {incarnation}: {watched.total()} tokens are booked without its last"
            f" counts: {watched.on_trust}"
            for (engine_id, incarnation), watched in self._engines.items()
            if watched.on_trust
        )

    def settle(self, trajectory_id: str, account: Account) -> None:
        self._trajectories.discard(trajectory_id)
        self._book(Settled(trajectory_id, account))

    def read_pages(self) -> None:
        """Take in the engines' counts as of now."""
        for (engine_id, incarnation), watched in self._engines.items():
            self._book(EngineCounted(engine_id, incarnation, watched.total()))

    def close(self) -> None:
        """Close whatever an early stop left open. Call when every engine has ended, so that its page is final."""
        for request_id, watched in list(self._requests.items()):
            self.end_request(request_id, 0, watched.engine.request_tokens(request_id))
        for watched in self._engines.values():
            if watched.on_trust:
                self._add_unreceived(watched, f"rest of {watched.engine.incarnation}", watched.total() - watched.booked)
        for trajectory_id in sorted(self._trajectories):
            self.settle(trajectory_id, Account.ABORTED)
        self.read_pages()

    def _add_unreceived(self, watched: _Watched, name: str, tokens: int) -> None:
        """Tokens that were generated for requests that are over, and of which nobody knew then."""
        if tokens == 0:
            return
        watched.booked += tokens
        for event in (
            Opened(name),
            RequestStarted(name, name, watched.engine.engine_id),
            RequestEnded(name, tokens),
            Settled(name, Account.ABORTED),
        ):
            self._book(event)

    def _book(self, event: LedgerEvent) -> None:
        self.ledger.step(event, time.monotonic())
