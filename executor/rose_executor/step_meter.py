"""What an engine's steps cost, by a clock that its owner chooses. Pure.

Invariants
- With asynchronous scheduling steps overlap: a step's cost begins where the one before it ended.
- Steps end in the order in which they began; only those that compute something count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rose_executor.step_shape import StepShape


class StepMeter:
    """`seconds` and `shape` are those of the last step that ended, `busy_s` the sum over all `steps`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: deque[tuple[float, StepShape]] = deque()
        self._began = self._ended = 0.0
        self.seconds = self.busy_s = 0.0
        self.shape = StepShape(0, 0)
        self.steps = 0

    @property
    def under_way(self) -> tuple[StepShape, ...]:
        """Each step that computes now."""
        return tuple(shape for _, shape in self._under_way)

    def begins(self) -> None:
        self._began = self._clock()

    def scheduled(self, shape: StepShape) -> None:
        """What the step that has begun last has to do."""
        if shape.tokens:
            self._under_way.append((self._began, shape))

    def ended(self) -> None:
        """The oldest step under way is over."""
        began, self.shape = self._under_way.popleft()
        now = self._clock()
        self.seconds = now - max(began, self._ended)
        self.busy_s += self.seconds
        self._ended = now
        self.steps += 1
