"""Figures that only grow, and begin again at nought with each life of what they are about. Pure."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 1.0


class Growth:
    """By how much such a figure has grown since it was seen last."""

    def __init__(self) -> None:
        self._before = 0.0

    def by(self, figure: float) -> float:
        """A figure smaller than before is one that began again."""
        grown = figure - self._before if figure >= self._before else figure
        self._before = figure
        return grown


class Share:
    """Which part of the last second or so a figure in seconds has grown by, from 0 to 1."""

    def __init__(self) -> None:
        self._growth = Growth()
        self._total = 0.0
        self._seen: deque[tuple[float, float]] = deque()

    def saw(self, seconds: float, now_s: float) -> float:
        """The figure at `now_s` of any clock. What it was at the first sight says nothing."""
        self._total += self._growth.by(seconds)
        self._seen.append((now_s, self._total))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return 0.0 if now_s <= since_s else min(1.0, (self._total - before) / (now_s - since_s))


class OpenSeconds:
    """For how long a guest might compute: by its own word, and where that is missing by its gate."""

    def __init__(self) -> None:
        self._growth = Growth()
        self._said = False
        self._stood_open = False
        self._seen_s = 0.0
        self._total_s = 0.0

    def saw(self, said_s: float | None, gate_open: bool, now_s: float) -> float:
        """The seconds until `now_s`. `said_s` is what the guest says of its own life so far, None if it is silent."""
        if said_s is not None:
            grown_s = self._growth.by(said_s)
            self._total_s += (
                grown_s if self._said else 0.0
            )  # what it was at the first sight was counted or is not known
        elif self._stood_open:
            self._total_s += now_s - self._seen_s
        self._said, self._stood_open, self._seen_s = said_s is not None, gate_open, now_s
        return self._total_s
