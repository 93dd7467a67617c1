"""Which of an engine's steps a profile learns from. Pure.

Each of the first ones; then one in some, so that one in some `EVERY_S` is, or one in `ONE_IN_MAX` where that is more:
what is learnt well gains little by more, and short steps would pay most for it.

Invariants
- Which steps are taken does not depend on how long they themselves took, so that they stand for all others.
- Nor do those that come once in so many fall between them, whatever the number: they are spread by the golden ratio.
"""

from __future__ import annotations

EACH_OF_FIRST = 256
EVERY_S = 0.05
ONE_IN_MAX = 16
_GOLDEN = 0.6180339887498949


class StepSampling:
    """Asked once for each step."""

    def __init__(self) -> None:
        self._share = 1.0
        self._at = 0.0

    def takes(self, learnt_steps: int, seconds: float) -> bool:
        """Whether a profile that has learnt from so many steps learns from this one, which took so long."""
        if learnt_steps < EACH_OF_FIRST:
            return True
        self._at = (self._at + _GOLDEN) % 1.0
        if self._at >= self._share:
            return False
        self._share = max(1 / ONE_IN_MAX, 1 / (1 + EVERY_S // seconds)) if seconds > 0 else 1 / ONE_IN_MAX
        return True
