"""What a token costs to compute, learnt from an engine's steps. Pure.

    seconds = fixed + token_s x tokens

by least squares, in which a step counts the less the more have come since. It says which turns may start where others
run; whether a guest's step is too long for serving is asked of `step_profile`, which errs on the side of serving.

Invariants
- Never negative, and 0 as long as steps have not differed enough to tell.
- A step that took much longer than its like, because something else had the processor, counts as if it had not.
"""

from __future__ import annotations

_KEPT = 1 - 1 / 1000
"""What a step still counts after the next one."""
_STEPS_MIN = 20.0
_DIFFER_MIN = 0.05
"""Spread of tokens, as a share of their mean square, from which a slope can be told."""
_LATE = 4.0


class TokenCost:
    """`saw` each step; `token_s` is what is known now."""

    def __init__(self) -> None:
        self._steps = self._tokens = self._seconds = self._squares = self._products = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds. What can be none is left out."""
        if tokens <= 0 or not 0 < seconds < float("inf"):
            return
        if self._steps >= _STEPS_MIN:
            seconds = min(seconds, _LATE * self._expected(tokens))
        self._steps = self._steps * _KEPT + 1
        self._tokens = self._tokens * _KEPT + tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._squares = self._squares * _KEPT + tokens * tokens
        self._products = self._products * _KEPT + tokens * seconds

    @property
    def token_s(self) -> float:
        spread = self._steps * self._squares - self._tokens * self._tokens
        if self._steps < _STEPS_MIN or spread < _DIFFER_MIN * self._steps * self._squares:
            return 0.0
        return max(0.0, (self._steps * self._products - self._tokens * self._seconds) / spread)

    def _expected(self, tokens: int) -> float:
        mean_tokens, mean_s = self._tokens / self._steps, self._seconds / self._steps
        return max(mean_s, mean_s + self.token_s * (tokens - mean_tokens))
