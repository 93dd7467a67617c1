"""Whether a guest is active, asleep or gone, as far as memory decides it. Pure.

    active   it computes, and holds keys and values within its budget
    asleep   it computes nothing and holds no keys and values; what is left is its *residue* (weights, buffers)
    gone     its process has ended; it holds nothing, and comes back only by a start

    state    event                                                           action
    active   the budget is less than one request needs, for `doze_s`         Sleep
    not gone its residue is more than it may hold in all, for `doze_s`       End
    asleep   a request fits, all the while it takes to wake and `settle_s`   Wake
             besides
    gone     its residue and a request fit, likewise                         Start

Invariants
- Nothing here knows what a state costs. The residue and the times of waking and starting are *measured*: what was never
  measured is unknown, and then a guest is neither ended for its residue nor kept from coming back by it.
- A guest goes down at the first cause that lasts and comes up only after a calm that is longer than coming up takes: a
  budget that swings leaves it down.
- What was measured outlives the process that it was measured on: the next one is like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rose.errors import ConfigError


class Presence(StrEnum):
    ACTIVE = "active"
    ASLEEP = "asleep"
    GONE = "gone"


class Move(StrEnum):
    """What is to be done with the guest now."""

    SLEEP = "sleep"
    WAKE = "wake"
    END = "end"
    START = "start"


@dataclass(frozen=True, slots=True)
class PresenceRules:
    """How long a cause must last before the guest goes down, and a calm before it comes up."""

    doze_s: float = 5.0
    settle_s: float = 10.0

    def __post_init__(self) -> None:
        if min(self.doze_s, self.settle_s) < 0:
            raise ConfigError(f"no presence by {self}", expected="times from 0")


@dataclass(frozen=True, slots=True)
class Room:
    """A look. `budget_bytes` is for keys and values, of which one request needs `need_bytes`.

    `may_hold_bytes` is for all that the guest holds, None for no limit.
    """

    budget_bytes: int
    need_bytes: int
    may_hold_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Residue:
    """Measured while the guest slept: what it holds all the same."""

    held_bytes: int


@dataclass(frozen=True, slots=True)
class Up:
    """The guest computes again, or for the first time: what it was asked for is done."""


@dataclass(frozen=True, slots=True)
class Died:
    """Its process has ended by itself, and will be started again by whoever supervises it."""


class GuestPresence:
    """One guest, through all its lives; it begins as one that is being started.

    `residue_bytes` is what it was last measured to hold asleep, `wake_s` and `start_s` how long it last took to come up
    from each state; None where nobody has measured. `why` says in words why it is not active, "" while it is.
    """

    def __init__(self, rules: PresenceRules, now: float) -> None:
        self.state = Presence.ACTIVE
        self.why = ""
        self.residue_bytes: int | None = None
        self.wake_s: float | None = None
        self.start_s: float | None = None
        self._rules = rules
        self._rising: tuple[Presence, float] | None = (Presence.GONE, now)
        self._small_since_s: float | None = None
        self._large_since_s: float | None = None
        self._calm_since_s: float | None = None

    def step(self, event: Room | Residue | Up | Died, now: float) -> Sequence[Move]:
        """What is to be done at `now` of the monotonic clock; at most one thing."""
        match event:
            case Residue(held_bytes):
                if self.state is Presence.ASLEEP:
                    self.residue_bytes = held_bytes
            case Up():
                self._came_up(now)
            case Died():
                self._rising = (Presence.GONE, now)
            case Room():
                return self._look(event, now)
        return ()

    def _came_up(self, now: float) -> None:
        if self._rising is None or self.state is not Presence.ACTIVE:
            return
        (came_from, since_s), self._rising = self._rising, None
        if came_from is Presence.GONE:
            self.start_s = now - since_s
        else:
            self.wake_s = now - since_s

    def _look(self, room: Room, now: float) -> Sequence[Move]:
        too_small = room.budget_bytes < room.need_bytes
        too_large = self._too_large(room)
        self._small_since_s = _since(self._small_since_s, too_small, now)
        self._large_since_s = _since(self._large_since_s, too_large, now)
        self._calm_since_s = _since(self._calm_since_s, not too_small and not too_large, now)
        if self.state is not Presence.GONE and _lasts(self._large_since_s, self._rules.doze_s, now):
            return self._goes(Presence.GONE, Move.END, "what it holds even asleep is more than there is room for")
        if self.state is Presence.ACTIVE:
            if _lasts(self._small_since_s, self._rules.doze_s, now):
                return self._goes(Presence.ASLEEP, Move.SLEEP, "its budget is less than one request needs")
            return ()
        return self._comes_up(now)

    def _comes_up(self, now: float) -> Sequence[Move]:
        takes_s = self.wake_s if self.state is Presence.ASLEEP else self.start_s
        if not _lasts(self._calm_since_s, self._rules.settle_s + (takes_s or 0.0), now):
            return ()
        self._rising = (self.state, now)
        move = Move.WAKE if self.state is Presence.ASLEEP else Move.START
        return self._goes(Presence.ACTIVE, move, "")

    def _too_large(self, room: Room) -> bool:
        """Asleep it must hold its residue; to come up from nothing it needs a request's keys and values besides."""
        if room.may_hold_bytes is None or self.residue_bytes is None:
            return False
        besides = room.need_bytes if self.state is Presence.GONE else 0
        return self.residue_bytes + besides > room.may_hold_bytes

    def _goes(self, state: Presence, move: Move, why: str) -> Sequence[Move]:
        self.state, self.why = state, why
        self._small_since_s = self._calm_since_s = None
        if state is not Presence.ACTIVE:
            self._rising = None
        return (move,)


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when something holds without a break."""
    if not holds:
        return None
    return now if before is None else before


def _lasts(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
