"""How much the counters of one service grew, over the last seconds. Pure.

Invariants
- Growth never falls: a counter that is lower than before has begun again from 0, and is added to what was.
- A counter that appears later than the first look has grown from 0.
- At most `looks_max` looks are kept, whatever the clock does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from rose.observer.exposition import Sample, Samples

Labels = tuple[tuple[str, str], ...]
Totals = Mapping[str, Mapping[Labels, float]]
"""Of each sample's name: by its labels, how much it has grown in all."""


class Growth:
    """The counters of one service. `at_s` are seconds that never fall."""

    def __init__(self, span_s: float, looks_max: int) -> None:
        self._span_s = span_s
        self._raw: Totals = {}
        self._looks: deque[tuple[float, Totals]] = deque(maxlen=looks_max)

    def look(self, at_s: float, counted: Samples) -> None:
        """Take all counters as they are now."""
        raw = {
            name: {tuple(sorted(sample.labels.items())): sample.value for sample in samples}
            for name, samples in counted.items()
        }
        before = self._looks[-1][1] if self._looks else None
        grown = (
            raw
            if before is None
            else {name: self._grown(name, raw.get(name, {}), before) for name in {**before, **raw}}
        )
        # What is not said for a while goes on from where it was.
        self._raw = {name: {**self._raw.get(name, {}), **raw.get(name, {})} for name in grown}
        self._looks.append((at_s, grown))
        while self._looks[0][0] < at_s - self._span_s:
            self._looks.popleft()

    def _grown(self, name: str, raw: Mapping[Labels, float], before: Totals) -> Mapping[Labels, float]:
        totals, last = before.get(name, {}), self._raw.get(name, {})
        return {
            **totals,
            **{labels: totals.get(labels, 0.0) + _step(last.get(labels, 0.0), value) for labels, value in raw.items()},
        }

    def over(self, seconds: float, name: str) -> tuple[float, list[Sample]]:
        """By how much each sample of `name` grew within the last `seconds`, and how long the time is that was seen."""
        if not self._looks:
            return 0.0, []
        now_s, newest = self._looks[-1]
        then_s, oldest = self._looks[bisect_left(self._looks, now_s - seconds, key=lambda look: look[0])]
        past = oldest.get(name, {})
        grown = [Sample(dict(labels), total - past.get(labels, 0.0)) for labels, total in newest.get(name, {}).items()]
        return now_s - then_s, grown


def _step(last: float, value: float) -> float:
    return value - last if value >= last else value
