"""Quantiles and shares of a histogram, by interpolation inside its buckets. Pure.

A histogram here is a mapping of upper bounds, in ascending order and ending at infinity, to how many values lie at or
below each. What is said of a value is therefore as fine as the bucket that it fell into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

Cumulative = Mapping[float, float]


def quantile(cumulative: Cumulative, fraction: float) -> float | None:
    """The value below which a `fraction` of all lie; None if there are none.

    What lies above the last finite bound is taken to be at that bound, since nothing is known of how far above.
    """
    total = max(cumulative.values(), default=0.0)
    if total <= 0:
        return None
    rank = fraction * total
    below, counted = 0.0, 0.0
    for bound, count in cumulative.items():
        if count >= rank and count > counted:
            if math.isinf(bound):
                return below
            return below + (bound - below) * max(0.0, rank - counted) / (count - counted)
        if not math.isinf(bound):
            below = bound
        counted = max(counted, count)
    return below


def share_below(cumulative: Cumulative, limit: float) -> float | None:
    """Which share lies at or below `limit`, above 0; None if there are no values."""
    total = max(cumulative.values(), default=0.0)
    if total <= 0:
        return None
    for (low, counted), (high, count) in pairwise([(0.0, 0.0), *cumulative.items()]):
        if limit < high:
            inside = 0.0 if math.isinf(high) else (limit - low) / (high - low)
            return (counted + inside * (count - counted)) / total
    return 1.0
