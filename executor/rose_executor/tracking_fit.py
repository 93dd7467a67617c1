"""The parts of a sum, found from rows and tracked as they change: a Kalman filter. Pure.

How little is known of the parts is their covariance. A row says what the parts come to in one mixture; `wander` and
`loosen` say that they may have changed since. A memory that fades with every row would lose what is not seen for a
while: an engine that decodes for an hour must still know what a prompt costs.

Invariants
- No part is ever negative: one that would be is 0, and the others are fitted to that.
- What is not known of a part does not grow beyond its own size, however long no row tells of it, and a part that no row
  tells of stays what it was.
- A covariance that rounding has spoilt loses its correlations, and is one again.
"""

from __future__ import annotations

from collections.abc import Sequence


class TrackingFit:
    """`parts` fit the rows so far; `covariance` is in units of one row's variance, symmetric, row by row."""

    def __init__(self, parts: Sequence[float], covariance: Sequence[Sequence[float]]) -> None:
        self.parts = list(parts)
        self.covariance = [list(row) for row in covariance]

    def wander(self, share: float, sizes: Sequence[float]) -> None:
        """Take it for possible that each part has changed by itself, with a variance of `share` of its size's square.

        Not where its variance is the square of that size already.
        """
        for at, size in enumerate(sizes):
            if self.covariance[at][at] < size * size:
                self.covariance[at][at] += share * size * size

    def loosen(self, share: float) -> None:
        """Take it for possible that all parts have changed by one factor, of that variance."""
        for line, mine in zip(self.covariance, self.parts, strict=True):
            for column, other in enumerate(self.parts):
                line[column] += share * mine * other

    def leverage(self, row: Sequence[float]) -> float:
        """The variance of what the parts make of this row, in units of one row's: above 1, it is hardly known."""
        return self._pulled(row)[1]

    def learn(self, row: Sequence[float], error: float, weight: float) -> None:
        """Take one row, and by how much its target exceeds what the parts make of it.

        It counts as `weight` of a row, from above 0 to 1.
        """
        pull, leverage = self._pulled(row)
        gain = weight / (1 + weight * leverage)
        for line, mine in zip(self.covariance, pull, strict=True):
            for column, other in enumerate(pull):
                line[column] -= gain * mine * other
        self.parts = [value + gain * error * mine for value, mine in zip(self.parts, pull, strict=True)]
        if min(self.parts) < 0:
            self._without_negative()

    def _pulled(self, row: Sequence[float]) -> tuple[list[float], float]:
        """By how much this row pulls at each part, and its leverage."""
        pull = [_dot(line, row) for line in self.covariance]
        leverage = _dot(row, pull)
        if leverage > 0:
            return pull, leverage
        size = len(self.covariance)
        self.covariance = [[self.covariance[i][i] if i == j else 0.0 for j in range(size)] for i in range(size)]
        pull = [_dot(line, row) for line in self.covariance]
        return pull, _dot(row, pull)

    def _without_negative(self) -> None:
        """The likeliest parts given that those below 0 are 0: the most negative first, as long as one is."""
        found, known = self.parts, self.covariance
        free = set(range(len(found)))
        while free and found[worst := min(free, key=found.__getitem__)] < 0:
            free.discard(worst)
            below, line = found[worst], known[worst]
            shift = [value / line[worst] if line[worst] > 0 else 0.0 for value in line]
            moved = [value - below * part for value, part in zip(found, shift, strict=True)]
            found = [value if at in free else 0.0 for at, value in enumerate(moved)]
            known = [
                [value - part * other for value, other in zip(mine, line, strict=True)]
                for mine, part in zip(known, shift, strict=True)
            ]
        self.parts = found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
