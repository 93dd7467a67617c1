"""What a step of an engine costs, learnt from its steps. Pure.

    seconds = margin * (fixed + per token + per sequence + per token of context)

The four parts are fitted to relative errors (`tracking_fit`), begin with what an earlier profile knew, and follow
what is seen. The margin is that of `step_drift`. Where only few steps were seen:

- A step larger than any seen costs in proportion: `f` times what the `f`-th part of it would cost.
- A step smaller than any seen costs as much as one that was seen, in what has not varied by `_VARIED` yet.
- What could as well be due to tokens as to sequences or context is put down to tokens.

Invariants
- No part is ever negative, so more never costs less.
- An error where little was seen is on the side of the serving engine.
- A step that took much longer than its like, because something else had the processor, counts as little as the steps
  around it say; many of them are no exception any more, and are learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rose_executor.step_drift import Drift, StepDrift
from rose_executor.step_shape import StepShape
from rose_executor.tracking_fit import TrackingFit

_SECONDS_MIN, _SECONDS_MAX = 1e-9, 3600.0
_AMOUNT_MAX = 2**40
"""More tokens than any step has."""
FIRST_TOKENS = 8
"""What may be tried of an engine of which no step was seen yet, or none for long."""
_WANDERING = 0.003
"""Variance by which a part may change at each step, as a share of its square: some hundreds of steps and it is new."""
_PART_MIN = 0.2
"""Share of the largest step's cost: what grows with a step, and makes up less, wanders as if it made up so much."""
_LOOSENED = 0.1
"""Variance, in units of one step's, of the factor by which an engine that drifts may become slower at each step."""
_ERROR_MAX = 8.0
"""A step that took longer than that, as a multiple of what was expected, counts less by as much."""
_DOUBTED_FROM = 3.0
"""Spreads by which a step may miss before it counts less."""
_SPREAD_FIRST, _SPREAD_MIN, _SPREAD_GAIN, _SPREAD_TAKEN_MAX = 0.1, 0.02, 1 / 32, 4.0
_CONTEXT_FREE_TOKENS = 256
"""Contexts that differ by less make no step larger than another."""
_UNKNOWN = (100.0, 100.0, 1.0, 1.0)
"""Variance of each part before the first step, in units of what that would be if the part made up all of it."""

_VARIED = 2
"""What steps had once, and that many times as much in others, is trusted to cost less where there is less of it."""

Amounts = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProfileState:
    """All that a profile knows, to be kept: see `TrackingFit`, and the least and most seen of each amount.

    `parts` are fixed, per token, per sequence, per token of context, in seconds; `spread` is the mean relative
    error; `steps` counts all that were ever learnt from.
    """

    parts: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    least: Amounts
    most: Amounts
    spread: float
    steps: int


class StepProfile:
    """Learns from `saw`; `seconds` and `tokens_within` tell. `steps` counts what it has learnt from, ever."""

    def __init__(self, state: ProfileState | None = None) -> None:
        self.steps = 0
        self._drift = StepDrift()
        self._spread = _SPREAD_FIRST
        self._fit: TrackingFit | None = None
        self._least: Amounts = (1, 1, 0)
        self._most: Amounts = (1, 1, 0)
        if state is not None:
            self.steps, self._spread = state.steps, state.spread
            self._fit = TrackingFit(state.parts, state.covariance)
            self._least, self._most = state.least, state.most
        self._least_trusted = _trusted(self._least, self._most)

    @property
    def margin(self) -> float:
        """What every estimate is multiplied by now, at least 1."""
        return self._drift.margin

    @property
    def token_s(self) -> float:
        """What a token more in a step is expected to cost; 0 as long as no step was seen."""
        return 0.0 if self._fit is None else self.margin * self._fit.parts[1]

    @property
    def drifted(self) -> Drift | None:
        """Since when, and by how much, steps cost another amount than expected; None while they do not."""
        return self._drift.drift

    def state(self) -> ProfileState | None:
        """What it knows, to begin another with; None if it never saw a step. The margin is found again in no time."""
        if self._fit is None:
            return None
        covariance = tuple(tuple(line) for line in self._fit.covariance)
        return ProfileState(tuple(self._fit.parts), covariance, self._least, self._most, self._spread, self.steps)

    def saw(self, shape: StepShape, seconds: float, now_s: float) -> None:
        """One step, at `now_s` of any one clock. What cannot be one (nothing computed, no time, no number) is left out.

        Takes some ten microseconds.
        """
        amounts = (shape.tokens, shape.seqs, shape.context_tokens)
        if not (_SECONDS_MIN <= seconds <= _SECONDS_MAX) or max(amounts) > _AMOUNT_MAX:
            return
        if shape.tokens <= 0 or shape.seqs <= 0 or shape.context_tokens < 0:
            return
        if self._fit is None:
            self._fit = _first_fit(amounts, seconds)
            self._least = self._most = self._least_trusted = amounts
            expected = seconds
        else:
            expected = self._line(amounts)
            self._drift.saw(seconds / max(self._cost(*amounts), seconds * 1e-9), now_s)
            least, most = _both(min, self._least, amounts), _both(max, self._most, amounts)
            if (least, most) != (self._least, self._most):
                self._least, self._most = least, most
                self._least_trusted = _trusted(least, most)
            self._learn(self._fit, amounts, expected, seconds)
        self.steps += 1

    def seconds(self, shape: StepShape) -> float:
        """What such a step is expected to cost; 0 as long as no step was seen."""
        return self.margin * self._cost(shape.tokens, shape.seqs, shape.context_tokens)

    def tokens_within(self, seconds: float, tokens_max: int, seqs: int = 1, context_tokens: int = 0) -> int:
        """The largest step that is expected to cost no more than that.

        It is for at most `seqs` sequences (a step has no more of them than tokens) with that context behind them.
        """
        if seconds <= 0:
            return 0
        if self._fit is None:
            return min(FIRST_TOKENS, tokens_max)
        within = seconds / self.margin
        if self._cost(tokens_max, min(seqs, tokens_max), context_tokens) <= within:
            return tokens_max
        low, high = 0, tokens_max  # `low` fits (as none does), `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._cost(middle, min(seqs, middle), context_tokens) <= within
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _cost(self, tokens: int, seqs: int, context_tokens: int) -> float:
        """Without the margin."""
        if self._fit is None:
            return 0.0
        most_tokens, most_seqs, most_context = self._most
        least_tokens, least_seqs, least_context = self._least_trusted
        contexts = (context_tokens + _CONTEXT_FREE_TOKENS) / (most_context + _CONTEXT_FREE_TOKENS)
        times = max(1.0, tokens / most_tokens, seqs / most_seqs, contexts)
        fixed, per_token, per_seq, per_context = self._fit.parts
        return (
            times * fixed
            + per_token * max(tokens, times * least_tokens)
            + per_seq * max(seqs, times * least_seqs)
            + per_context * max(context_tokens, times * least_context)
        )

    def _line(self, amounts: Amounts) -> float:
        assert self._fit is not None
        fixed, per_token, per_seq, per_context = self._fit.parts
        return fixed + per_token * amounts[0] + per_seq * amounts[1] + per_context * amounts[2]

    def _learn(self, fit: TrackingFit, amounts: Amounts, expected: float, seconds: float) -> None:
        # In units of what is expected, because a step misses by a part of what it costs, be it long or short.
        unit = max(expected, seconds / _ERROR_MAX)
        row = (1 / unit, amounts[0] / unit, amounts[1] / unit, amounts[2] / unit)
        error = (seconds - expected) / unit
        fit.wander(_WANDERING, self._sizes(fit))
        if self.drifted is not None:
            # What makes an engine slower makes most often all of it slower, and that is learnt from any step.
            fit.loosen(_LOOSENED)
        missed = abs(error)
        doubted_from = _DOUBTED_FROM * self._spread
        weight = 1.0 if missed <= doubted_from else doubted_from / missed
        fit.learn(row, error, weight)
        taken = min(missed, _SPREAD_TAKEN_MAX * self._spread)
        self._spread = max(_SPREAD_MIN, self._spread + _SPREAD_GAIN * (taken - self._spread))

    def _sizes(self, fit: TrackingFit) -> tuple[float, float, float, float]:
        """Of the parts, as they wander: none stays 0 for ever because it was 0 once."""
        fixed, per_token, per_seq, per_context = fit.parts
        tokens, seqs, context = self._most
        least = _PART_MIN * self._line(self._most)
        return (
            fixed,
            max(per_token, least / tokens),
            max(per_seq, least / seqs),
            max(per_context, least / max(context, _CONTEXT_FREE_TOKENS)),
        )


def _first_fit(amounts: Amounts, seconds: float) -> TrackingFit:
    sizes = (1, amounts[0], amounts[1], max(amounts[2], _CONTEXT_FREE_TOKENS))
    known = [unknown * (seconds / size) ** 2 for unknown, size in zip(_UNKNOWN, sizes, strict=True)]
    fit = TrackingFit([0.0] * 4, [[one if i == j else 0.0 for j in range(4)] for i, one in enumerate(known)])
    row = (1 / seconds, *(amount / seconds for amount in amounts))
    fit.learn(row, 1.0, 1.0)
    return fit


def _trusted(least: Amounts, most: Amounts) -> Amounts:
    """The least of each amount that a step counts for: none where it has varied."""
    tokens, seqs, context = (low if high < _VARIED * low else 0 for low, high in zip(least, most, strict=True))
    return tokens, seqs, context


def _both(pick: Callable[[int, int], int], seen: Amounts, now: Amounts) -> Amounts:
    return pick(seen[0], now[0]), pick(seen[1], now[1]), pick(seen[2], now[2])
