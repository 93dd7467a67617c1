"""The token ledger: every token that an engine generated ends in exactly one account.

A pure core. Two independent sources meet here. What the engine *generated* comes from its token page
(`EngineCounted`) and from nowhere else; what became of the tokens comes from whoever read the streams.
`gap()` is the difference, so a token that one side forgets shows. While streams run the gap is whatever is
on the wire (positive) or was received since the page was last read (negative); once every request has ended
and every page was read after that, it must be 0.

Invariants
- A token is received once, sits in *in-flight* until its trajectory settles, and moves once.
- The sum over all accounts is what was received plus what was reported unreceived.
- The generated count of an incarnation never falls; `generated()` adds over incarnations, dead ones too.
- An event that breaks a rule is recorded as a violation and moves no token. Nothing is raised: the ledger
  of a broken run must still be readable.

State table of a trajectory ("refused": a violation is recorded and nothing changes)

    state      Opened   RequestStarted   Received, RequestEnded   Settled
    unknown    → open   refused          refused                  refused
    open       refused  request opens    as its request says      → settled if no request is open, else refused
    settled    refused  refused          refused                  refused

State table of a request; an id may be used again once it has ended

    state      RequestStarted   Received             RequestEnded
    unknown    → open           refused              refused
    open       refused          + in-flight          → ended; generated − received goes to unreceived
    ended      → open           refused (too late)   refused

A count below what was received is a violation, but the request ends all the same. Settled trajectories are
forgotten, apart from the ids of the most recent ones, which name a second settlement for what it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from rose.violations import Violations

RECENT_SETTLED = 4096


class Account(StrEnum):
    """Where a generated token can be."""

    TRAINED = "trained"
    STALE = "stale"
    ZERO_VARIANCE = "zero-variance"
    TRUNCATED = "truncated"
    ENVIRONMENT_FAILED = "environment-failed"
    ABORTED = "aborted"
    UNRECEIVED = "unreceived"
    EVALUATION = "evaluation"
    IN_FLIGHT = "in-flight"


NOT_FINAL = frozenset({Account.IN_FLIGHT, Account.UNRECEIVED})


@dataclass(frozen=True, slots=True)
class Opened:
    """A trajectory begins."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request for one turn, or for the rest of one, was sent to an engine."""

    request_id: str
    trajectory_id: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class Received:
    """`tokens` more output tokens of a request arrived."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Nothing more will be read from a request.

    `generated` is None after a clean finish, when everything arrived. After a broken or closed stream it is
    the engine's own count for this request, read from its token page once the page says that the request
    has finished or the engine is dead; read earlier, the engine may sample on and leave a gap.
    """

    request_id: str
    generated: int | None


@dataclass(frozen=True, slots=True)
class Settled:
    """A trajectory's tokens go to their final account; unreceived and in-flight are not final."""

    trajectory_id: str
    account: Account


@dataclass(frozen=True, slots=True)
class EngineCounted:
    """The token page of one incarnation of an engine: tokens generated since that incarnation started."""

    engine_id: str
    incarnation: str
    generated: int


LedgerEvent = Opened | RequestStarted | Received | RequestEnded | Settled | EngineCounted


@dataclass(slots=True)
class _Trajectory:
    in_flight: int = 0
    open_requests: int = 0


@dataclass(slots=True)
class _Request:
    trajectory_id: str
    engine_id: str
    received: int = 0


class TokenLedger:
    """Counts tokens by account; all reads are totals since the start of the run."""

    def __init__(self, recent_settled: int = RECENT_SETTLED) -> None:
        self._totals = dict.fromkeys(Account, 0)
        self._generated: dict[tuple[str, str], int] = {}
        self._trajectories: dict[str, _Trajectory] = {}
        self._requests: dict[str, _Request] = {}
        self._recent_settled = recent_settled
        self._settled: OrderedDict[str, Account] = OrderedDict()
        self._violations = Violations()

    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        """Book one event. The ledger decides nothing, so it never asks for an action; time plays no part."""
        match event:
            case Received():
                self._received(event)
            case RequestStarted():
                self._request_started(event)
            case RequestEnded():
                self._request_ended(event)
            case Opened():
                self._opened(event)
            case Settled():
                self._settle(event)
            case EngineCounted():
                self._engine_counted(event)
        return ()

    def accounts(self) -> dict[Account, int]:
        """Tokens in each account."""
        return dict(self._totals)

    def generated(self) -> int:
        """Tokens generated, by the engines' own count, as of the last reading of each page."""
        return sum(self._generated.values())

    def gap(self) -> int:
        """Generated minus the sum of all accounts: 0 when nothing is under way and every page was read."""
        return self.generated() - sum(self._totals.values())

    def open_requests(self) -> int:
        """Requests started and not ended."""
        return len(self._requests)

    def unsettled(self) -> int:
        """Trajectories opened and not settled."""
        return len(self._trajectories)

    def violations(self) -> tuple[str, ...]:
        """Broken rules, oldest first. Past the first 100 they are only counted, by one last line."""
        return self._violations.lines()

    def balanced(self) -> bool:
        """No gap, no open request and no violation. Tokens may still be in flight."""
        return self.gap() == 0 and not self._requests and not self._violations.lines()

    def _opened(self, event: Opened) -> None:
        if event.trajectory_id in self._trajectories or event.trajectory_id in self._settled:
            self._violations.add(f"trajectory {event.trajectory_id} opened twice")
            return
        self._trajectories[event.trajectory_id] = _Trajectory()

    def _request_started(self, event: RequestStarted) -> None:
        trajectory = self._trajectories.get(event.trajectory_id)
        if trajectory is None:
            self._violations.add(f"request {event.request_id} started for {self._why_not_open(event.trajectory_id)}")
        elif event.request_id in self._requests:
            self._violations.add(f"request {event.request_id} started while it is open")
        else:
            trajectory.open_requests += 1
            self._requests[event.request_id] = _Request(event.trajectory_id, event.engine_id)

    def _received(self, event: Received) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            self._violations.add(f"{event.tokens} tokens received for request {event.request_id}, which is not open")
        elif event.tokens < 0:
            self._violations.add(f"{event.tokens} tokens received for request {event.request_id}")
        else:
            request.received += event.tokens
            self._trajectories[request.trajectory_id].in_flight += event.tokens
            self._totals[Account.IN_FLIGHT] += event.tokens

    def _request_ended(self, event: RequestEnded) -> None:
        request = self._requests.pop(event.request_id, None)
        if request is None:
            self._violations.add(f"request {event.request_id} ended, which is not open")
            return
        self._trajectories[request.trajectory_id].open_requests -= 1
        if event.generated is None:
            return
        unreceived = event.generated - request.received
        if unreceived < 0:
            self._violations.add(
                f"request {event.request_id}: {request.received} tokens received, "
                f"but engine {request.engine_id} counts {event.generated}"
            )
        else:
            self._totals[Account.UNRECEIVED] += unreceived

    def _settle(self, event: Settled) -> None:
        trajectory = self._trajectories.get(event.trajectory_id)
        if trajectory is None:
            self._violations.add(f"{self._why_not_open(event.trajectory_id)} settled as {event.account}")
        elif event.account in NOT_FINAL:
            self._violations.add(
                f"trajectory {event.trajectory_id} settled as {event.account}, which is not a final account"
            )
        elif trajectory.open_requests:
            self._violations.add(
                f"trajectory {event.trajectory_id} settled with {trajectory.open_requests} requests open"
            )
        else:
            del self._trajectories[event.trajectory_id]
            self._totals[Account.IN_FLIGHT] -= trajectory.in_flight
            self._totals[event.account] += trajectory.in_flight
            self._settled[event.trajectory_id] = event.account
            if len(self._settled) > self._recent_settled:
                self._settled.popitem(last=False)

    def _engine_counted(self, event: EngineCounted) -> None:
        key = (event.engine_id, event.incarnation)
        before = self._generated.get(key, 0)
        if event.generated < before:
            self._violations.add(
                f"engine {event.engine_id}, incarnation {event.incarnation}: "
                f"its count fell from {before} to {event.generated}"
            )
            return
        self._generated[key] = event.generated

    def _why_not_open(self, trajectory_id: str) -> str:
        account = self._settled.get(trajectory_id)
        if account is None:
            return f"trajectory {trajectory_id}, which is not open,"
        return f"trajectory {trajectory_id}, already settled as {account},"
