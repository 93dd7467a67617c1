"""What is usual by now. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_GAIN = 0.2
"""Of what the newest says over all before it."""


@dataclass(slots=True)
class Mean:
    """Of figures one after another, the newest counting most; `mean` is 0 before the first."""

    mean: float = 0.0
    seen: int = 0

    def saw(self, figure: float) -> None:
        self.mean = figure if not self.seen else self.mean + _GAIN * (figure - self.mean)
        self.seen += 1
