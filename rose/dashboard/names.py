"""Short names for services, and the order of what is shown. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rose.observer.measures import SeriesKey

_ID = re.compile(r"(?P<name>.+)-\d{8}-\d{6}-(?P<tail>[0-9a-f]{4})")


def short_names(service_ids: Iterable[str]) -> Mapping[str, str]:
    """`executor` for `executor-20260801-120000-ab12`; with the last four where two have the same name."""
    parts = {one: found.groups() if (found := _ID.fullmatch(one)) else (one, one) for one in service_ids}
    often = Counter(name for name, _ in parts.values())
    return {one: name if often[name] == 1 else f"{name} {tail}" for one, (name, tail) in parts.items()}


def of_figure(latest: Mapping[SeriesKey, float], *figures: str) -> dict[SeriesKey, float]:
    """Those of the figures, in an order that stays."""
    found = [key for key in latest if key.figure in figures]
    found.sort(key=lambda key: (key.source.service, key.source.target, figures.index(key.figure), key.label))
    return {key: latest[key] for key in found}
