"""How fast bytes may leave: a token bucket. A pure core.

Invariants
- Over any time t, at most `burst_bytes` + t × rate are let go, plus the one piece that is being sent.
- Takers are served in the order in which they took.
"""

from __future__ import annotations


class TokenBucket:
    """Starts full. Rates in bytes per second."""

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        if bytes_per_s <= 0 or burst_bytes <= 0:
            raise ValueError(f"a bucket of {burst_bytes} bytes filled with {bytes_per_s} bytes/s lets nothing go")
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._level_bytes = float(burst_bytes)
        self._at_s: float | None = None

    def take(self, size_bytes: int, now: float) -> float:
        """Take, perhaps in advance. Returns the seconds to wait before sending."""
        if self._at_s is not None:
            filled = self._level_bytes + (now - self._at_s) * self._bytes_per_s
            self._level_bytes = min(float(self._burst_bytes), filled)
        self._at_s = now
        self._level_bytes -= size_bytes
        return max(0.0, -self._level_bytes / self._bytes_per_s)
