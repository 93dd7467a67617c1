"""When requests of a replay are sent: the pure core of an open loop.

Invariants
- When a request is due depends on the trace and the beginning alone, never on an answer.
- A request that is due is sent at once, or refused at once because `in_flight_max` are in flight. None waits.
- A request that left more than LATE_S after it was due is late by the client's fault: sent all the same, and counted.
  So a client that cannot keep up shows, and never passes for a slow or a fast engine.
- Every request is sent, refused or, after a stop, unsent; every one sent ends once; then the core finishes, once.

    state      Begin     Due              Ended              Stop
    idle       running   -                -                  finished (all unsent)
    running    error     send or refuse   finished if last   stopping: what is in flight is cut
    stopping   error     nothing          finished if last   nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rose.driver.core import After
from rose.errors import ContractError

LATE_S = 0.01


@dataclass(frozen=True, slots=True)
class Begin:
    """Now is second 0 of the trace."""


@dataclass(frozen=True, slots=True)
class Due:
    """The next request may be due."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was to be sent has ended, however it did; it had left `lag_s` seconds after it was due."""

    index: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Send no more, and cut what is in flight."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send request `index`, due at `due_s`; its `Ended` must follow."""

    index: int
    due_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Request `index`, due at `due_s`, is not sent: the cap."""

    index: int
    due_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """End these requests now; their `Ended` must follow."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is in flight and nothing more is to be sent."""


LoopEvent = Begin | Due | Ended | Stop
LoopAction = Send | Refuse | Cut | Finish


@dataclass(slots=True)
class LoopCounts:
    """`late` are of those ended; `lag_s` is the longest that one left after it was due."""

    sent: int = 0
    late: int = 0
    refused: int = 0
    ended: int = 0
    unsent: int = 0
    lag_s: float = 0.0


class OpenLoop:
    """Plays requests that arrive at `arrivals_s` seconds, in order, once."""

    def __init__(self, arrivals_s: Sequence[float], in_flight_max: int) -> None:
        self.counts = LoopCounts()
        self._arrivals_s = arrivals_s
        self._in_flight_max = in_flight_max
        self._in_flight: dict[int, None] = {}
        self._next = 0
        self.begin: float | None = None
        """On the driver's clock: second 0 of the trace."""
        self._stopping = False
        self._finished = False

    def step(self, event: LoopEvent, now: float) -> list[LoopAction | After[LoopEvent]]:
        """Raises ContractError for an event that cannot be."""
        match event:
            case Begin():
                if self.begin is not None or self._stopping:
                    raise ContractError("an open loop begins once")
                self.begin = now
                return [*self._due(now), *self._finish()]
            case Due():
                return [*self._due(now), *self._finish()]
            case Ended(index, lag_s):
                return self._ended(index, lag_s)
            case Stop():
                return self._stop()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def finished(self) -> bool:
        return self._finished

    def _due(self, now: float) -> list[LoopAction | After[LoopEvent]]:
        if self._stopping or self.begin is None:
            return []
        actions: list[LoopAction | After[LoopEvent]] = []
        while self._next < len(self._arrivals_s):
            due_s = self._arrivals_s[self._next]
            early_s = self.begin + due_s - now
            if early_s > 0:
                actions.append(After(early_s, Due()))
                break
            actions.append(self._send(self._next, due_s))
            self._next += 1
        return actions

    def _send(self, index: int, due_s: float) -> LoopAction:
        if len(self._in_flight) >= self._in_flight_max:
            self.counts.refused += 1
            return Refuse(index, due_s)
        self._in_flight[index] = None
        self.counts.sent += 1
        return Send(index, due_s)

    def _ended(self, index: int, lag_s: float) -> list[LoopAction | After[LoopEvent]]:
        if index not in self._in_flight:
            raise ContractError(f"request {index} ended, and was not in flight")
        del self._in_flight[index]
        self.counts.ended += 1
        self.counts.late += lag_s > LATE_S
        self.counts.lag_s = max(self.counts.lag_s, lag_s)
        return self._finish()

    def _stop(self) -> list[LoopAction | After[LoopEvent]]:
        if self._stopping:
            return []
        self._stopping = True
        self.counts.unsent = len(self._arrivals_s) - self._next
        self._next = len(self._arrivals_s)
        if self._in_flight:
            return [Cut(tuple(self._in_flight))]
        return self._finish()

    def _finish(self) -> list[LoopAction | After[LoopEvent]]:
        if self._finished or self._in_flight or self._next < len(self._arrivals_s):
            return []
        self._finished = True
        return [Finish()]
