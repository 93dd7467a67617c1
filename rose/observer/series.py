"""Series on one time axis, bounded: a fine axis of the last ticks, and a coarse one of means behind it. Pure.

Invariants
- Time only rises. Every series has a place for every tick; where it said nothing there is a gap.
- Memory is bounded by `series_max` times the two lengths. A new series takes the place of the one that has been silent
  longest; if all speak, it is refused and counted.
- A coarse value is the mean of what was said in its ticks; a coarse tick stands where the last of them stood.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Columns(Generic[K]):
    """Times in ascending order, and of each series as many values; None is a gap."""

    times: list[float]
    values: dict[K, list[float | None]]


class _Axis:
    """The times of the last `length` ticks, in a ring."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0
        self.times = _gaps(length)

    def append(self, at_s: float) -> int:
        """The place of the new tick in every column."""
        place = self.count % self.length
        self.times[place] = at_s
        self.count += 1
        return place

    def places(self) -> list[int]:
        """Where its ticks lie, oldest first."""
        return [tick % self.length for tick in range(max(0, self.count - self.length), self.count)]


class _Series:
    def __init__(self, fine: int, coarse: int) -> None:
        self.fine, self.coarse = _gaps(fine), _gaps(coarse)
        self.said_at = 0
        self.sum, self.said = 0.0, 0


class SeriesStore(Generic[K]):
    """Series by their keys; a tick is whatever interval the caller appends at."""

    def __init__(
        self, *, fine: int = 1800, ticks_per_coarse: int = 10, coarse: int = 1440, series_max: int = 1024
    ) -> None:
        self._fine, self._coarse = _Axis(fine), _Axis(coarse)
        self._per_coarse = ticks_per_coarse
        self._span = max(fine, ticks_per_coarse * coarse)
        self._series_max = series_max
        self._series: dict[K, _Series] = {}
        self._newest_s = -math.inf
        self.refused = 0

    def __len__(self) -> int:
        return len(self._series)

    def keys(self) -> list[K]:
        return list(self._series)

    def append(self, at_s: float, values: Mapping[K, float]) -> None:
        """One tick. Raises ValueError if time has not risen since the last."""
        if at_s <= self._newest_s:
            raise ValueError(f"time went back from {self._newest_s} to {at_s}")
        self._newest_s = at_s
        tick = self._fine.count
        for key in values:
            if key not in self._series and self._room(tick):
                self._series[key] = _Series(self._fine.length, self._coarse.length)
        place = self._fine.append(at_s)
        for key, one in self._series.items():
            one.fine[place] = value = values.get(key, math.nan)
            if key in values:
                one.said_at, one.sum, one.said = tick, one.sum + value, one.said + 1
        if self._fine.count % self._per_coarse == 0:
            self._end_coarse(at_s)

    def _end_coarse(self, at_s: float) -> None:
        place = self._coarse.append(at_s)
        for key, one in list(self._series.items()):
            one.coarse[place] = one.sum / one.said if one.said else math.nan
            one.sum, one.said = 0.0, 0
            if one.said_at < self._fine.count - self._span:
                del self._series[key]

    def _room(self, tick: int) -> bool:
        """Whether there is place for one more series, at the cost of one that is silent now."""
        if len(self._series) < self._series_max:
            return True
        silent = min(self._series, key=lambda key: self._series[key].said_at)
        if self._series[silent].said_at >= tick - 1:
            self.refused += 1
            return False
        del self._series[silent]
        return True

    def columns(self, keys: Iterable[K] | None = None) -> Columns[K]:
        """All there is of these series, or of all: coarse where the fine axis does not reach any more, then fine."""
        fine = self._fine.places()
        begins_s = self._fine.times[fine[0]] if fine else math.inf
        coarse = [place for place in self._coarse.places() if self._coarse.times[place] < begins_s]
        times = [self._coarse.times[place] for place in coarse] + [self._fine.times[place] for place in fine]
        return Columns(
            times,
            {
                key: [*_read(one.coarse, coarse), *_read(one.fine, fine)]
                for key in (self._series if keys is None else keys)
                if (one := self._series.get(key)) is not None
            },
        )


def _gaps(length: int) -> array[float]:
    return array("d", [math.nan]) * length


def _read(column: array[float], places: list[int]) -> Iterator[float | None]:
    for place in places:
        yield None if math.isnan(column[place]) else column[place]
