"""One core that a serving engine and its guest share: what each step of one costs the other.

Invariants
- A guest's step begins only where no step of the serving engine is under way.
- A serving step that begins beside a guest's step becomes longer by `interference` of what that one still costs, and
  by nothing else. Where the guest stands below (interference under 1), its step waits for the serving step to end;
  where they take turns (1), it is finished first.
"""

from __future__ import annotations

from collections.abc import Callable

from rose.simulator.coserving.parts import PartsDriver


class SharedCore:
    """`gap_s` is how long the core is free between two serving steps; `freed` hears when it becomes so."""

    def __init__(self, driver: PartsDriver, interference: float, gap_s: float) -> None:
        self.interference = interference
        self.gap_s = gap_s
        self.serving_busy = False
        self.freed: Callable[[], None] = lambda: None
        self._driver = driver
        self._guest_ended: Callable[[], None] | None = None
        self._guest_left_s = 0.0
        self._guest_since_s = 0.0
        self._guest_run = 0

    def serving_begins(self, cost_s: float, ended: Callable[[], None]) -> None:
        """A serving step begins, which would cost so much with no guest there."""
        self.serving_busy = True
        excess_s = 0.0
        if self._guest_ended is not None:
            left_s = self._guest_left_s - (self._driver.now - self._guest_since_s)
            excess_s = self.interference * left_s
            if self.interference < 1:
                self._guest_left_s = left_s - excess_s
                self._guest_run += 1
        self._driver.call(cost_s + excess_s, "", lambda: self._serving_ended(ended))

    def guest_begins(self, cost_s: float, ended: Callable[[], None]) -> None:
        """A guest's step begins; only where `serving_busy` is not so."""
        self._guest_left_s, self._guest_ended = cost_s, ended
        self._guest_runs()

    def guest_stops(self) -> None:
        """The guest is dead or frozen in the middle of a step."""
        self._guest_ended = None
        self._guest_run += 1

    def _guest_runs(self) -> None:
        self._guest_since_s = self._driver.now
        self._guest_run += 1
        run = self._guest_run
        self._driver.call(self._guest_left_s, "", lambda: self._guest_done(run))

    def _guest_done(self, run: int) -> None:
        ended = self._guest_ended
        if run == self._guest_run and ended is not None:
            self._guest_ended = None
            ended()

    def _serving_ended(self, ended: Callable[[], None]) -> None:
        self.serving_busy = False
        if self._guest_ended is not None and self.interference < 1:
            self._guest_runs()
        ended()
        self.freed()
