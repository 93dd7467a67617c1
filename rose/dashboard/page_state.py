"""All that the page shows of one look, as plain data in sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rose.dashboard.charts import charts
from rose.dashboard.lending import lending
from rose.dashboard.panels import runs, service_row
from rose.dashboard.tiles import tiles
from rose.observer.measures import SeriesKey
from rose.observer.observer import View
from rose.observer.services import Service
from rose.run_names import short_names

PART = "dashboard"
"""The part of a status page by which a dashboard knows another."""


def page_state(view: View, known: Iterable[SeriesKey], told: Mapping[SeriesKey, float]) -> dict[str, Any]:
    """The sections; `known` are the series in memory, `told` is what each last said, however long ago.

    `idle` says that nothing runs but what looks on.
    """
    names = short_names(view.services)
    idle = all(_looks_on(service) for service in view.services.values())
    return {
        "idle": idle,
        "tiles": [asdict(tile) for tile in tiles(view.latest)],
        "lending": [] if idle else [asdict(one) for one in lending(view.services, view.latest, names)],
        "charts": [asdict(chart) for chart in charts(known, view.latest, names)],
        "runs": runs(view.services, view.latest, told, names),
        "services": {key: service_row(one, view.problems, names) for key, one in view.services.items()},
    }


def _looks_on(service: Service) -> bool:
    return service.page is not None and any(part.name == PART for part in service.page.parts)
