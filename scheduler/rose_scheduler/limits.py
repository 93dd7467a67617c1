"""How much the scheduler remembers, and how long it believes; every figure bounds something."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`beat_deadline_s` without a beat make an engine stale, `dead_after_s` dead. Raises ValueError if none can be.

    `waiting` leases may wait and `engines` be known at once. `trajectories` with no open lease and `ended` leases are
    remembered, the newest of them.
    """

    beat_deadline_s: float = 3.0
    dead_after_s: float = 15.0
    waiting: int = 4096
    engines: int = 1024
    trajectories: int = 32_768
    ended: int = 16_384
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_deadline_s < self.dead_after_s:
            raise ValueError(f"beat_deadline_s={self.beat_deadline_s} is not below dead_after_s={self.dead_after_s}")
        if min(self.waiting, self.engines, self.trajectories, self.ended) < 1 or self.retry_after_s <= 0:
            raise ValueError(f"every limit is above 0: {self}")
