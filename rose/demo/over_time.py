"""What the director has seen over time, as the report's series.

Invariants
- A part that was started again is one line: wherever its new self speaks, that is what the line says.
- Times are seconds after the run began, so that of serving alone are negative. Lines are thinned, never smoothed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rose.observer.figures import WINDOW_S
from rose.observer.measures import SeriesKey
from rose.observer.observer import View
from rose.observer.series import Columns, SeriesStore
from rose.processes import session_of
from rose.report.coserving import Measure, Series, Sharing

POINTS_MAX = 400
_UNKNOWN = "unknown: no executor told"
GUEST = "executor"
"""A guest is leased by its executor's name."""


@dataclass(slots=True)
class Watched:
    """The store, and which services play which role; `pids` says which process, or leader of a session, has which.

    `board` are moments (`time.time()` seconds) and serving's compute share in the seconds before each, which fill what
    no executor told: serving alone, and the time until the executor is there.
    """

    store: SeriesStore[SeriesKey] = field(default_factory=SeriesStore)
    pids: dict[int, str] = field(default_factory=dict)
    services: dict[str, set[str]] = field(default_factory=dict)
    partition: str = _UNKNOWN
    board: list[tuple[float, float]] = field(default_factory=list)

    def seen(self, view: View) -> None:
        """After each look of the observer."""
        for service in view.services.values():
            role = None if service.page is None else self._role(service.page.pid)
            if service.page is None or role is None:
                continue
            self.services.setdefault(role, set()).add(service.service_id)
            if role == GUEST:
                for part in service.page.parts:
                    if part.name == "partition":
                        self.partition = f"{part.state}: {part.detail}" if part.detail else part.state

    def _role(self, pid: int) -> str | None:
        return self.pids.get(pid) or self.pids.get(session_of(pid))


@dataclass(frozen=True, slots=True)
class _Line:
    what: Measure
    role: str
    figure: str
    who: str
    label: str = ""
    target: str = ""
    factor: float = 1.0


def _lines(dedicated: Sequence[str]) -> tuple[_Line, ...]:
    return (
        _Line("compute", GUEST, "compute", "serving", label="serving"),
        _Line("compute", GUEST, "compute", "guest", label="guest"),
        _Line("kv_used", GUEST, "kv", "serving", label="serving"),
        _Line("kv_used", GUEST, "kv", "guest", label="guest"),
        _Line("gate_open", GUEST, "gate", "guest"),
        _Line("ttft_p95_ms", "director", "ttft p95", "serving", target="load", factor=1e3),
        _Line("tpot_p95_ms", "director", "tpot p95", "serving", target="load", factor=1e3),
        _Line("rollout_tokens_s", GUEST, "guest tokens", GUEST),
        _Line("weight_version", GUEST, "guest version", GUEST),
        *(_Line("rollout_tokens_s", "run", "engine tokens", one, target=one) for one in dedicated),
        *(_Line("weight_version", "run", "version", one, label=one) for one in dedicated),
    )


def sharing_section(watched: Watched, dedicated: Sequence[str], began_at_s: float) -> Sharing:
    """`dedicated` are the run's own engines; `began_at_s` is when the run began, in `time.time()` seconds."""
    columns = watched.store.columns()
    merged: dict[tuple[Measure, str], list[float | None]] = {}
    for line in _lines(dedicated):
        values = _joined(columns, _keys(columns, watched.services.get(line.role, set()), line))
        if values is not None:
            scaled = [None if value is None else line.factor * value for value in values]
            before = merged.get((line.what, line.who))
            merged[line.what, line.who] = scaled if before is None else _over(before, scaled)
    executors = watched.services.get(GUEST, set())

    def counted(figure: str) -> int:
        return round(sum(_last(columns.values[key]) for key in _of(columns, executors, figure)))

    series = [_thinned(what, who, columns.times, values, began_at_s) for (what, who), values in merged.items()]
    return Sharing(
        partition=watched.partition,
        series=tuple(_begun(one, watched.board, began_at_s) for one in series),
        guest_restarts=counted("guest restarts"),
        preemptions=counted("preemptions"),
        starvations=counted("starvations"),
        window_s=WINDOW_S,
        fetched_bytes=counted("fetched"),
    )


def _of(columns: Columns[SeriesKey], services: set[str], figure: str) -> list[SeriesKey]:
    return [key for key in columns.values if key.source.service in services and key.figure == figure]


def _keys(columns: Columns[SeriesKey], services: set[str], line: _Line) -> list[SeriesKey]:
    found = _of(columns, services, line.figure)
    return [key for key in found if (key.source.target, key.label) == (line.target, line.label)]


def _joined(columns: Columns[SeriesKey], keys: Iterable[SeriesKey]) -> list[float | None] | None:
    joined: list[float | None] | None = None
    for key in keys:
        joined = columns.values[key] if joined is None else _over(joined, columns.values[key])
    return joined


def _over(below: Sequence[float | None], above: Sequence[float | None]) -> list[float | None]:
    """Two lines of one thing on one axis: what is above covers."""
    return [low if high is None else high for low, high in zip(below, above, strict=True)]


def _last(values: Sequence[float | None]) -> float:
    return next((value for value in reversed(values) if value is not None), 0.0)


def _thinned(
    what: Measure, who: str, times: Sequence[float], values: Sequence[float | None], began_at_s: float
) -> Series:
    known = [place for place, value in enumerate(values) if value is not None]
    places = range(known[0], known[-1] + 1) if known else range(0)
    kept = places[:: max(1, -(-len(places) // POINTS_MAX))]
    return Series(
        what=what,
        who=who,
        at_s=tuple(round(times[place] - began_at_s, 3) for place in kept),
        values=tuple(values[place] for place in kept),
    )


def _begun(series: Series, board: Sequence[tuple[float, float]], began_at_s: float) -> Series:
    """Serving's compute share begins with what the board said before an executor did."""
    if (series.what, series.who) != ("compute", "serving"):
        return series
    first_s = min(series.at_s, default=float("inf"))
    before = [(at_s - began_at_s, value) for at_s, value in board if at_s - began_at_s < first_s]
    return Series(
        what=series.what,
        who=series.who,
        at_s=(*(at_s for at_s, _ in before), *series.at_s),
        values=(*(value for _, value in before), *series.values),
    )
