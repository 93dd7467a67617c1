"""Brings each look to every open page: a whole state first, then what changes.

Invariants
- A look is encoded once, whoever watches. A page that reads slower than looks come has at most `PENDING_MAX` of them
  waiting; then it gets one whole, fresh state in their place.
- At most `VIEWERS_MAX` pages are open at once.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rose.dashboard.charts import series_id
from rose.dashboard.increments import increment
from rose.dashboard.page_state import page_state
from rose.errors import DeadlineExceeded
from rose.metrics import DashboardMetrics
from rose.observer.measures import SeriesKey
from rose.observer.observer import View
from rose.observer.series import SeriesStore
from rose.waits import WaitBoard

PENDING_MAX = 8
VIEWERS_MAX = 32
LOOK_TIMEOUT_S = 10.0
_DIGITS = 5


class _Viewer:
    def __init__(self) -> None:
        self.pending: deque[bytes] = deque()
        self.behind = True
        self.told = asyncio.Event()


class Hub:
    """All open pages. `at_s` is when the last look was, of the observer's clock; None before the first."""

    def __init__(self, store: SeriesStore[SeriesKey], waits: WaitBoard, metrics: DashboardMetrics) -> None:
        self.at_s: float | None = None
        self._store = store
        self._waits = waits
        self._metrics = metrics
        self._state: dict[str, Any] = {}
        self._told: dict[SeriesKey, float] = {}
        self._shown: dict[str, SeriesKey] = {}
        self._viewers: set[_Viewer] = set()
        self._closed = False

    def seen(self, view: View) -> None:
        """Take a look, and tell every page of it."""
        before, known = self._state, self._store.keys()
        told = {**self._told, **view.latest}
        self._told = {key: value for key, value in told.items() if key.source.service in view.services}
        self._state = page_state(view, known, self._told)
        ids = {line["series"] for chart in self._state["charts"] for line in chart["lines"]}
        self._shown = {name: key for key in known if (name := series_id(key)) in ids}
        self.at_s = view.at_s
        values = {name: _short(view.latest[key]) for name, key in self._shown.items() if key in view.latest}
        changed = increment(before, self._state) if before else self._state
        self._tell(_event("look", {"at_s": round(view.at_s, 3), "values": values, "state": changed}))
        self._count(view)

    def _tell(self, event: bytes) -> None:
        for viewer in self._viewers:
            if len(viewer.pending) >= PENDING_MAX:
                viewer.pending.clear()
                viewer.behind = True
            else:
                viewer.pending.append(event)
            viewer.told.set()

    def _count(self, view: View) -> None:
        self._metrics.services.set(len(view.services))
        self._metrics.unanswered.set(len(view.problems))
        self._metrics.series.set(len(self._store))
        self._metrics.series_refused.set(self._store.refused)
        self._metrics.open_waits.set(len(self._waits.snapshot()))

    def whole(self) -> Mapping[str, Any]:
        """Everything there is to show, with the past of every series that a chart shows."""
        columns = self._store.columns(self._shown.values())
        return {
            "format": 1,
            "at_s": None if self.at_s is None else round(self.at_s, 3),
            "state": self._state,
            "times": [round(at_s, 3) for at_s in columns.times],
            "values": {
                name: [None if value is None else _short(value) for value in columns.values[key]]
                for name, key in self._shown.items()
                if key in columns.values
            },
        }

    @property
    def full(self) -> bool:
        return len(self._viewers) >= VIEWERS_MAX

    async def events(self) -> AsyncIterator[bytes]:
        """The stream of one page, until it goes, looks stop coming, or the hub is closed."""
        viewer = _Viewer()
        self._viewers.add(viewer)
        self._metrics.viewers.set(len(self._viewers))
        try:
            while not self._closed:
                viewer.told.clear()
                for event in self._due(viewer):
                    yield event
                if not self._closed:
                    await self._waits.within(
                        viewer.told.wait(), "next look", "observer", LOOK_TIMEOUT_S, boundary="cluster"
                    )
        except DeadlineExceeded:
            return
        finally:
            self._viewers.discard(viewer)
            self._metrics.viewers.set(len(self._viewers))

    def _due(self, viewer: _Viewer) -> list[bytes]:
        if viewer.behind and self.at_s is not None:
            viewer.behind = False
            viewer.pending.clear()
            self._metrics.snapshots.inc()
            return [_event("whole", self.whole())]
        due = list(viewer.pending)
        viewer.pending.clear()
        return due

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for viewer in self._viewers:
            viewer.told.set()


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


def _short(value: float) -> float:
    """To five digits: more are not seen."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
