"""What the measured points say of larger models on faster links, held against points that it was not fitted to.

A version is published (every weight read, every changed one written), then sent, and applied while it arrives:

    seconds = publish + wait + max(send, apply) + min(send, apply) / buckets
    publish = p + (a x bytes + b x touched) / cores that help       apply = q + (c x bytes + d x touched) / cores
    send    = bytes per changed x changed / rate of the link

Touched are the pairs of cache lines, 128 bytes, in which something has changed: memory comes in these, so a second
change in one costs next to nothing. A line through the numbers of changed elements is a quarter too low at 1 %, if it
goes through what 0.3 and 3 % take to apply.

p, a, b, q, c, d and the wait (what is asked and told before anything is sent) are fitted to points of several sizes and
densities, none of them below nothing, so that what a version costs in any case is not taken for the cost of its bytes.
Bytes per changed element follow the density between those of the points.

Projections assume that work divides among cores (buckets are independent, and each rank publishes its own), that these
read memory as fast together as the measured ones do, and that nothing else is on the link. They are no measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

_TOUCHED_BYTES = 128


@dataclass(frozen=True, slots=True)
class Point:
    """What one version took: `apply_s` is work, part of which was done while more was arriving."""

    model_bytes: float
    changed: float
    sent_bytes: float
    buckets: int
    seconds: float
    publish_s: float
    apply_s: float

    @property
    def density(self) -> float:
        return self.changed / self.model_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """`fixed_s` in any case, and seconds `per_byte` of weights and `per_touched` pair of cache lines."""

    fixed_s: float
    per_byte: float
    per_touched: float

    def seconds(self, model_bytes: float, changed: float, speed_up: float = 1.0) -> float:
        return (
            self.fixed_s + (self.per_byte * model_bytes + self.per_touched * touched(model_bytes, changed)) / speed_up
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """`sent` has (density, bytes per changed element) of the points, sparse ones first."""

    publish: Work
    apply: Work
    wait_s: float
    sent: tuple[tuple[float, float], ...]

    def seconds(
        self, model_bytes: float, changed: float, buckets: int, link_bytes_per_s: float, speed_ups: tuple[float, float]
    ) -> float:
        """From new weights at the trainer to new weights at the engine.

        `speed_ups`: how many times as many cores publish, and apply, as did for the points.
        """
        publish = self.publish.seconds(model_bytes, changed, speed_ups[0])
        apply = self.apply.seconds(model_bytes, changed, speed_ups[1])
        return publish + self.wait_s + self._overlapped(model_bytes, changed, buckets, link_bytes_per_s, apply)

    def _overlapped(self, model_bytes: float, changed: float, buckets: int, rate: float, apply_s: float) -> float:
        densities, sizes = np.log(np.array(self.sent)).T
        per_changed = float(np.exp(np.interp(np.log(changed / model_bytes), densities, sizes)))
        send_s = per_changed * changed / rate
        return max(send_s, apply_s) + min(send_s, apply_s) / buckets


def touched(model_bytes: float, changed: float) -> float:
    """How many pairs of cache lines `changed` elements of bfloat16 are in, anywhere among all."""
    elements = _TOUCHED_BYTES / 2
    return model_bytes / _TOUCHED_BYTES * (1 - float((1 - changed / model_bytes * 2) ** elements))


def fitted(points: Sequence[Point], link_bytes_per_s: float) -> Costs:
    """To points of at least two sizes and two densities. Raises ValueError if there are less."""
    if min(len({point.buckets for point in points}), len({round(point.density, 4) for point in points})) < 2:
        raise ValueError("points of one size, or of one density, do not tell what depends on which")
    publish = _work(points, [point.publish_s for point in points])
    apply = _work(points, [point.apply_s for point in points])
    sent = tuple(sorted((point.density, point.sent_bytes / point.changed) for point in points))
    without = Costs(publish, apply, 0.0, sent)
    waited = [
        point.seconds
        - point.publish_s
        - without._overlapped(point.model_bytes, point.changed, point.buckets, link_bytes_per_s, point.apply_s)
        for point in points
    ]
    return Costs(publish, apply, max(0.0, median(waited)), sent)


def error(costs: Costs, point: Point, link_bytes_per_s: float) -> float:
    """By how much of what was measured the model is off."""
    told = costs.seconds(point.model_bytes, point.changed, point.buckets, link_bytes_per_s, (1.0, 1.0))
    return abs(told - point.seconds) / point.seconds


def _work(points: Sequence[Point], seconds: Sequence[float]) -> Work:
    """The least error in proportion to what was measured, over all choices of terms that are not negative."""
    measured = np.array(seconds)
    terms = (
        np.array([(1.0, point.model_bytes, touched(point.model_bytes, point.changed)) for point in points])
        / measured[:, None]
    )
    best, least = np.zeros(3), float("inf")
    for count in (1, 2, 3):
        for chosen in map(list, itertools.combinations(range(3), count)):
            found = np.linalg.lstsq(terms[:, chosen], np.ones(len(points)), rcond=None)[0]
            off = float(np.sum((terms[:, chosen] @ found - 1) ** 2))
            if np.all(found >= 0) and off < least:
                best, least = np.zeros(3), off
                best[chosen] = found
    return Work(*map(float, best))
