"""Whether an engine's steps still cost what its profile expects. Pure.

Each step's ratio of seen to expected is kept for 64 steps, and judged by their upper quantile: not by one slow step,
but by what one in ten exceeds.

    upper quantile              drifted             margin
    within the band             no                  1
    above the band              yes, slower         the quantile, or the largest of the last 16 ratios if that is less
    below one in the band       yes, faster         1

Invariants
- The margin is from 1 to `MARGIN_MAX`. It widens with the seventh slow step at the latest, of those that it is told of
  (see `step_sampling`), and narrows as soon as the profile has learnt, before the old ratios have left the window.
- What drifted has drifted until the quantile is well inside the band again: nobody is told the same thing twice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import islice

BAND = 1.4
"""Of all recorded steps of two models on CPU, learnt as they came, the upper quantile never left this band."""
MARGIN_MAX = 8.0
"""A guest whose steps cost more than that, all of a sudden, gets too little for more of a margin to matter."""
_WELL_INSIDE = 1.2
_WINDOW_STEPS = 64
_JUDGED_FROM_STEPS = 16
_LAST_STEPS = 16
_UPPER = 0.9


@dataclass(frozen=True, slots=True)
class Drift:
    """Since when steps cost another amount than expected, and the factor that one in ten of them exceeds.

    `since_s` is of the clock that the steps were told with.
    """

    since_s: float
    factor: float


class StepDrift:
    """`margin` is what an estimate is to be multiplied by; `drift` is None while steps cost what is expected."""

    def __init__(self) -> None:
        self.margin = 1.0
        self.drift: Drift | None = None
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def saw(self, ratio: float, now_s: float) -> None:
        """One step has cost `ratio` times what was expected of it."""
        self._recent.append(ratio)
        insort(self._sorted, ratio)
        if len(self._recent) > _WINDOW_STEPS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        if len(self._sorted) < _JUDGED_FROM_STEPS:
            return
        upper = self._sorted[int(_UPPER * len(self._sorted))]
        band = BAND if self.drift is None else _WELL_INSIDE
        if 1 / band <= upper <= band:
            self.margin, self.drift = 1.0, None
            return
        last = max(islice(reversed(self._recent), _LAST_STEPS))
        self.margin = min(max(1.0, min(upper, last)), MARGIN_MAX)
        self.drift = Drift(now_s if self.drift is None else self.drift.since_s, upper)
