"""Series that were sampled at different moments, brought onto the same even bins.

Invariants
- A bin holds the mean of what was measured in it, None where nothing was; nothing is made up in between.
- Every series of a report is binned over the same stretch, so what stands one below the other happened together.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.report.coserving import Series, Sharing

BINS_MAX = 180
NARROWEST_S = 1.0


@dataclass(frozen=True, slots=True)
class Bins:
    """`count` stretches of `width_s` from `start_s` on, in seconds after the run began."""

    start_s: float
    width_s: float
    count: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.width_s * self.count

    def middles(self) -> list[float]:
        return [round(self.start_s + (number + 0.5) * self.width_s, 2) for number in range(self.count)]

    def means(self, series: Series) -> list[float | None]:
        """One value for each bin."""
        sums, counts = [0.0] * self.count, [0] * self.count
        for at_s, value in zip(series.at_s, series.values, strict=True):
            number = int((at_s - self.start_s) // self.width_s)
            if value is not None and 0 <= number < self.count:
                sums[number] += value
                counts[number] += 1
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def bins_of(sharing: Sharing, wall_s: float) -> Bins:
    """From the first moment of any series, or the run's beginning, to the end of the run or of the last series.

    A bin is never narrower than the spacing of the coarsest series, which would look torn.
    """
    filled = [series for series in sharing.series if len(series.at_s) > 1]
    start_s = min([0.0, *(series.at_s[0] for series in filled)])
    end_s = max([wall_s, 1.0, *(series.at_s[-1] for series in filled)])
    spacings = [(series.at_s[-1] - series.at_s[0]) / (len(series.at_s) - 1) for series in filled]
    width_s = max([NARROWEST_S, (end_s - start_s) / BINS_MAX, *(1.5 * spacing for spacing in spacings)])
    return Bins(start_s, width_s, int((end_s - start_s) / width_s) + 1)
