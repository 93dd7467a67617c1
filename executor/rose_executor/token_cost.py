"""What a token of a context costs to compute, learnt from an engine's steps. Pure.

    seconds = fixed + sequence_s x sequences + token_s x tokens

by least squares, in which a step counts the less the more have come since. Sequences stand apart because a step that
only samples has one token of each, which costs far more than one more token of a context. It says which turns may start
where others run; whether a guest's step is too long for serving is asked of `step_profile`, which errs on its side.

Invariants
- Never negative, and 0 as long as steps have not differed enough to tell.
- A step that took much longer than its like, because something else had the processor, counts as if it had not.
"""

from __future__ import annotations

_KEPT = 1 - 1 / 1000
"""What a step still counts after the next one."""
_STEPS_MIN = 20.0
_DIFFER_MIN = 0.05
"""Variance of tokens that sequences do not explain, as a share of their mean square, from which a slope can be told."""
_LATE = 4.0


class TokenCost:
    """`saw` each step; `token_s` tells what is known now."""

    def __init__(self) -> None:
        self._steps = 0.0
        # Sums over steps: of each of tokens, sequences and seconds, and of their products.
        self._t = self._q = self._s = 0.0
        self._tt = self._tq = self._qq = self._ts = self._qs = 0.0

    def saw(self, tokens: int, sequences: int, seconds: float) -> None:
        """A step has computed so many tokens, for so many sequences. What can be no step is left out."""
        if tokens <= 0 or sequences <= 0 or not 0 < seconds < float("inf"):
            return
        if self._steps >= _STEPS_MIN:
            seconds = min(seconds, _LATE * self._expected(tokens))
        self._steps = self._steps * _KEPT + 1
        self._t = self._t * _KEPT + tokens
        self._q = self._q * _KEPT + sequences
        self._s = self._s * _KEPT + seconds
        self._tt = self._tt * _KEPT + tokens * tokens
        self._tq = self._tq * _KEPT + tokens * sequences
        self._qq = self._qq * _KEPT + sequences * sequences
        self._ts = self._ts * _KEPT + tokens * seconds
        self._qs = self._qs * _KEPT + sequences * seconds

    @property
    def token_s(self) -> float:
        """Seconds."""
        if self._steps < _STEPS_MIN:
            return 0.0
        n = self._steps
        t, q, s = self._t / n, self._q / n, self._s / n
        tt, tq, qq = self._tt / n - t * t, self._tq / n - t * q, self._qq / n - q * q
        ts, qs = self._ts / n - t * s, self._qs / n - q * s
        # What sequences explain of tokens, and of seconds, is taken out of both.
        share = tq / qq if qq > 1e-9 * q * q else 0.0
        alone = tt - share * tq
        if alone < _DIFFER_MIN * (tt + t * t):
            return 0.0
        return max(0.0, (ts - share * qs) / alone)

    def _expected(self, tokens: int) -> float:
        mean_tokens, mean_s = self._t / self._steps, self._s / self._steps
        return max(mean_s, mean_s + self.token_s * (tokens - mean_tokens))
