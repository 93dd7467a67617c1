"""The services of this user as an observer knows them: found by their status pages, remembered a while after their end.

- A service's page says where its metrics are: the fact `metrics`, and `metrics NAME` for what it looks after besides.
- One that is gone is kept with its last page for `REMEMBERED_S`, so that how it ended can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rose.observer.measures import Source
from rose.runs import list_runs
from rose.status import Liveness, Page, RunStatus, read_status

REMEMBERED_S = 900.0
REMEMBERED_MAX = 20
TARGETS_MAX = 16
_FACT = "metrics"


class Life(StrEnum):
    """LIVE, STALE, DEAD: as `rose.status` has them. ENDED: gone, with all that it had in its runtime folder."""

    LIVE = "live"
    STALE = "stale"
    DEAD = "dead"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Service:
    """`page` is the last that was read; `problem` says why there is none. Times are `time.time()` seconds."""

    service_id: str
    life: Life
    page: Page | None
    problem: str
    seen_s: float

    @property
    def runs(self) -> bool:
        return self.life in (Life.LIVE, Life.STALE)


def read_services(root: Path, now_s: float) -> list[RunStatus]:
    """Every status page under `root`. Waits for no one but the disk."""
    return [read_status(found, now_s) for found in list_runs(root)]


def updated(before: Mapping[str, Service], read: Iterable[RunStatus], now_s: float) -> dict[str, Service]:
    """What is known after a look, in order of the ids."""
    known = {one.run_id: _service(one, now_s) for one in read}
    gone = sorted((one for key, one in before.items() if key not in known), key=lambda one: -one.seen_s)
    for one in gone[:REMEMBERED_MAX]:
        if now_s - one.seen_s <= REMEMBERED_S and one.page is not None:
            known[one.service_id] = replace(one, life=Life.ENDED)
    return dict(sorted(known.items()))


def _service(status: RunStatus, now_s: float) -> Service:
    life = {Liveness.LIVE: Life.LIVE, Liveness.STALE: Life.STALE, Liveness.DEAD: Life.DEAD}[status.liveness]
    return Service(status.run_id, life, status.page, status.problem, now_s)


def targets(services: Iterable[Service]) -> dict[Source, str]:
    """Where to look for metrics: those of every service that has not ended."""
    return {
        Source(service.service_id, name): url
        for service in services
        if service.page is not None and service.runs
        for name, url in list(_addresses(service.page).items())[:TARGETS_MAX]
    }


def _addresses(page: Page) -> dict[str, str]:
    return {
        key.removeprefix(_FACT).strip(): value
        for key, value in page.facts.items()
        if (key == _FACT or key.startswith(f"{_FACT} ")) and isinstance(value, str)
    }
