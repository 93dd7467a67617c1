"""The order of what is shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rose.observer.measures import SeriesKey


def of_figure(latest: Mapping[SeriesKey, float], *figures: str) -> dict[SeriesKey, float]:
    """Those of the figures, in an order that stays."""
    found = [key for key in latest if key.figure in figures]
    found.sort(key=lambda key: (key.source.service, key.source.target, figures.index(key.figure), key.label))
    return {key: latest[key] for key in found}
