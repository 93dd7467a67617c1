"""What an engine's steps cost, by a clock that its owner chooses. Pure.

Invariants
- With asynchronous scheduling steps overlap: a step's cost begins where the one before it ended.
- Steps end in the order in which they began; only those that compute something count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class StepMeter:
    """`seconds` and `tokens` are those of the last step that ended, `busy_s` the sum over all `steps`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: deque[tuple[float, int]] = deque()
        self._began = self._ended = 0.0
        self.seconds = self.busy_s = 0.0
        self.tokens = self.steps = 0

    @property
    def under_way(self) -> tuple[int, ...]:
        """The tokens of each step that computes now."""
        return tuple(tokens for _, tokens in self._under_way)

    def begins(self) -> None:
        self._began = self._clock()

    def scheduled(self, tokens: int) -> None:
        """The step that has begun last computes so many."""
        if tokens:
            self._under_way.append((self._began, tokens))

    def ended(self) -> None:
        """The oldest step under way is over."""
        began, self.tokens = self._under_way.popleft()
        now = self._clock()
        self.seconds = now - max(began, self._ended)
        self.busy_s += self.seconds
        self._ended = now
        self.steps += 1
