"""What one step of an engine costs, learnt from its steps. Pure.

A step costs something fixed and something per token: a line, fitted to the steps seen, of which older ones count
less and less. That a longer context or another mixture costs more is followed, not modelled.

Invariants
- Neither part of the line is ever negative, so more tokens never cost less.
- Where too little was seen for a line, more tokens than seen are taken to cost in proportion, fewer to cost the same:
  an error is on the side of the serving engine.
"""

from __future__ import annotations

import math

_KEPT = 0.98
"""Weight of everything seen before, at each further step: the last fifty or so steps decide."""
_FIRST_TOKENS = 8
"""What may be tried of an engine of which no step was seen yet."""


class StepProfile:
    """Learns from `saw`; `seconds` and `tokens_within` tell."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """One step. What cannot be one (nothing computed, no time, no number) is left out."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        self._weight = self._weight * _KEPT + 1.0
        self._x = self._x * _KEPT + tokens
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + tokens * tokens
        self._xy = self._xy * _KEPT + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """What a step of so many tokens is expected to cost; 0 as long as no step was seen."""
        fixed, per_token = self._line(tokens)
        return fixed + per_token * tokens

    def tokens_within(self, seconds: float, tokens_max: int) -> int:
        """The largest step that is expected to cost no more than that."""
        if seconds <= 0:
            return 0
        if not self._weight:
            return min(_FIRST_TOKENS, tokens_max)
        if self.seconds(tokens_max) <= seconds:
            return tokens_max
        low, high = 0, tokens_max  # `low` fits (as none does), `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle)
        return low

    def _line(self, tokens: int) -> tuple[float, float]:
        if not self._weight:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread < 0.01 * mean_x * mean_x:
            return (mean_y, 0.0) if tokens <= mean_x else (0.0, mean_y / mean_x)
        per_token = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        if per_token * mean_x > mean_y:
            return 0.0, mean_y / mean_x
        return mean_y - per_token * mean_x, per_token
