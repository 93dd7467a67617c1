"""Which of an engine's steps a profile learns from. Pure.

Each of the first ones; then so many are left out behind each that was taken that one in some `EVERY_S` is, but at most
`LEFT_OUT_MAX`: what is learnt well gains little by more, and short steps would pay most for it.

Which steps are taken does not depend on how long they themselves took, so that they stand for all others.
"""

from __future__ import annotations

EACH_OF_FIRST = 256
EVERY_S = 0.05
LEFT_OUT_MAX = 15


class StepSampling:
    """Asked once for each step."""

    def __init__(self) -> None:
        self._left_out = 0

    def takes(self, learnt_steps: int, seconds: float) -> bool:
        """Whether a profile that has learnt from so many steps learns from this one, which took so long."""
        if learnt_steps < EACH_OF_FIRST:
            return True
        if self._left_out:
            self._left_out -= 1
            return False
        self._left_out = min(LEFT_OUT_MAX, int(EVERY_S / seconds)) if seconds > 0 else LEFT_OUT_MAX
        return True
