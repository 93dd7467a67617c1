"""Which of an engine's steps a profile learns from. Pure.

Each of the first ones, then one in `SPARSE`: what is learnt well gains little by more, and every step would pay for it.
"""

from __future__ import annotations

from itertools import count

EACH_OF_FIRST = 256
SPARSE = 4


class StepSampling:
    """Asked once for each step."""

    def __init__(self) -> None:
        self._seen = count()

    def takes(self, learnt_steps: int) -> bool:
        """Whether a profile that has learnt from so many steps learns from this one."""
        return learnt_steps < EACH_OF_FIRST or next(self._seen) % SPARSE == 0
