"""When an engine is started again after it died, and when it is given up. Pure.

Invariants
- At most one start is under way; it is ordered only when the last incarnation is dead.
- Deaths are bounded: `restarts_max` restarts in all, with a delay that doubles from `backoff_s` to `backoff_max_s`
  while incarnations fail to start or live for less than `good_s`. One that was ready for longer is followed at once.
- GAVE_UP is final.
- An incarnation that is ended because it was held down is no death: it counts against nothing, and nothing delays the
  next one. While it is held down none is started.

State table ("ignored": no change, no action)

    state     Wanted            Ready            Died
    idle      → starting: Start ignored          ignored
    starting  ignored           → ready: Watch   → waiting: Start later, or → gave up: GiveUp
    ready     ignored           ignored          → waiting: Start later, or → gave up: GiveUp
    waiting   → starting: Start ignored          ignored
    held      ignored           ignored          ignored
    gave up   ignored           ignored          ignored

    state     Held down                                      Let up
    starting  End; once it is dead → held, or if it was let up meanwhile → starting: Start
    ready     End; likewise
    waiting   → held, when the timer's Wanted comes           as before
    held      ignored                                         → starting: Start
    others    ignored                                         ignored

*Wanted* is the owner's first order and, after that, the timer's. One that becomes ready although it was to end is ended
then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rose.driver.core import After


class EngineState(StrEnum):
    """See the state table above."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    HELD = "held"
    GAVE_UP = "gave up"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The engine should run."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The incarnation that was started answers."""


@dataclass(frozen=True, slots=True)
class Died:
    """The incarnation ended, or never came up. `why` in words."""

    why: str


@dataclass(frozen=True, slots=True)
class HeldDown:
    """The engine should not run until it is let up."""


@dataclass(frozen=True, slots=True)
class LetUp:
    """It may run again."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start an incarnation; answer Ready or Died."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Answer Died when the incarnation ends."""


@dataclass(frozen=True, slots=True)
class End:
    """End the incarnation that there is, if there is one; its Died comes from whoever watches or starts it."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Too many deaths; `why` is the last one's."""

    why: str


HealthEvent = Wanted | Ready | Died | HeldDown | LetUp
HealthAction = Start | Watch | End | GiveUp | After[HealthEvent]


class EngineHealth:
    """One engine's lives. `restarts_max` counts every start after the first; the rest are seconds."""

    def __init__(
        self, restarts_max: int, backoff_s: float = 0.5, backoff_max_s: float = 30.0, good_s: float = 60.0
    ) -> None:
        self.state = EngineState.IDLE
        self.restarts = 0
        self._restarts_max = restarts_max
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._good_s = good_s
        self._delay_s = 0.0
        self._ready_at = 0.0
        self._again_at = 0.0
        self._held = False
        self._ending = False

    def step(self, event: HealthEvent, now: float) -> tuple[HealthAction, ...]:
        """Take one event."""
        match self.state, event:
            case (_, HeldDown() | LetUp()):
                return self._hold(event)
            case (EngineState.WAITING, Wanted()) if self._held:
                self.state = EngineState.HELD
            case (EngineState.IDLE | EngineState.WAITING, Wanted()):
                self.state = EngineState.STARTING
                return (Start(),)
            case (EngineState.STARTING, Ready()):
                self.state = EngineState.READY
                self._ready_at = now
                return (Watch(), End()) if self._ending else (Watch(),)
            case (EngineState.STARTING | EngineState.READY, Died()) if self._ending:
                return self._ended()
            case (EngineState.STARTING, Died(why)):
                return self._again(why, now, lived_s=0.0)
            case (EngineState.READY, Died(why)):
                return self._again(why, now, lived_s=now - self._ready_at)
        return ()

    def _hold(self, event: HeldDown | LetUp) -> tuple[HealthAction, ...]:
        self._held = isinstance(event, HeldDown)
        if self._held and self.state in (EngineState.STARTING, EngineState.READY):
            self._ending = True
            return (End(),)
        if not self._held and self.state is EngineState.HELD:
            self.state = EngineState.STARTING
            return (Start(),)
        return ()

    def _ended(self) -> tuple[HealthAction, ...]:
        self._ending = False
        self.state = EngineState.HELD if self._held else EngineState.STARTING
        return () if self._held else (Start(),)

    def words(self, now: float) -> str:
        """Which restart is due, and when; "" if none is."""
        if self.state is not EngineState.WAITING:
            return ""
        return f"restart {self.restarts} of {self._restarts_max} in {max(0.0, self._again_at - now):.1f} s"

    def _again(self, why: str, now: float, *, lived_s: float) -> tuple[HealthAction, ...]:
        if self.restarts >= self._restarts_max:
            self.state = EngineState.GAVE_UP
            return (GiveUp(why),)
        self.restarts += 1
        self.state = EngineState.WAITING
        if lived_s >= self._good_s:
            self._delay_s = 0.0
        else:
            self._delay_s = min(max(self._backoff_s, 2 * self._delay_s), self._backoff_max_s)
        self._again_at = now + self._delay_s
        return (After(self._delay_s, Wanted()),)
