"""When a probe costs the engine that it tells of too much: the rule by which it switches itself off. Pure.

Invariants
- What its calls took is held against the time of the engine's own steps, not against time in which nobody serves.
- One moment decides nothing: a process that was stopped in the middle of a call, or had to wait for its processor. Of
  each window the dearest call is left out, and it takes `_DEAR_WINDOWS` in a row.
"""

from __future__ import annotations

SHARE_MAX = 0.05
"""Of the steps' time. A sound probe stays far below: some 15 microseconds a step."""
WINDOW_S = 2.0
"""Of steps."""
_CALLS_MIN = 3
_DEAR_WINDOWS = 2


class ProbeCost:
    """One probe, from the engine's first step on."""

    def __init__(self) -> None:
        self._dear_windows = 0
        self._from_busy_s = 0.0
        self._calls = 0
        self._spent_s = self._dearest_s = 0.0

    def spent(self, seconds: float, busy_s: float) -> str:
        """A call took so long; `busy_s` is what all steps took so far. Why the probe is to go, "" if it may stay."""
        self._calls += 1
        self._spent_s += seconds
        self._dearest_s = max(self._dearest_s, seconds)
        stepped_s = busy_s - self._from_busy_s
        if stepped_s < WINDOW_S or self._calls < _CALLS_MIN:
            return ""
        share = (self._spent_s - self._dearest_s) / stepped_s
        self._dear_windows = self._dear_windows + 1 if share > SHARE_MAX else 0
        self._from_busy_s = busy_s
        self._calls = 0
        self._spent_s = self._dearest_s = 0.0
        if self._dear_windows < _DEAR_WINDOWS:
            return ""
        return f"its calls took {share:.0%} of the time of the engine's steps, allowed is at most {SHARE_MAX:.0%}"
