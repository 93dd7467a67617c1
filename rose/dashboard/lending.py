"""Whether serving's idle time is lent now, and if not, why: one sentence for each executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose.dashboard.tiles import share
from rose.observer.measures import SeriesKey, Source
from rose.observer.services import Life, Service
from rose.status import Page

_NO_EXECUTOR = (
    "Nothing is lent: no executor runs beside a serving engine. `rose executor --help` says how to start one."
)
_WELL = ("ready", "serving", "offered", "healthy", "following", "live", "running")


@dataclass(frozen=True, slots=True)
class Lending:
    """`executor` is its id, "" for the sentence that says there is none."""

    executor: str
    name: str
    lent: bool
    sentence: str


def is_executor(service: Service) -> bool:
    """It is one by its parts: it has a guest."""
    return service.page is not None and _part(service.page, "guest") is not None


def lending(
    services: Mapping[str, Service], latest: Mapping[SeriesKey, float], names: Mapping[str, str]
) -> list[Lending]:
    """Of every executor that has not ended, in order; what is to be done where there is none."""
    executors = [one for one in services.values() if is_executor(one) and one.life in (Life.LIVE, Life.STALE)]
    if not executors:
        return [Lending("", "", lent=False, sentence=_NO_EXECUTOR)]
    return [_of(one, latest, names.get(one.service_id, one.service_id)) for one in executors]


def _of(service: Service, latest: Mapping[SeriesKey, float], name: str) -> Lending:
    def figure(what: str, label: str = "") -> float | None:
        return latest.get(SeriesKey(Source(service.service_id), what, label))

    gate, slots, guest, tokens_s = figure("gate"), figure("slots"), figure("running", "guest"), figure("guest tokens")
    why = _why_not(service, gate, slots, guest, figure("running", "serving"))
    if why:
        return Lending(service.service_id, name, lent=False, sentence=f"Nothing is lent: {why}")
    words = [f"the gate was open {share(gate or 0.0)} of the time"]
    if guest is not None:
        words.append(f"the guest runs {guest:.0f} {'request' if guest == 1 else 'requests'}")
    if tokens_s is not None:
        words.append(f"{tokens_s:,.0f} tokens/s")
    if slots is not None:
        words.append(f"{slots:.0f} more could come" if slots else "no room for more")
    return Lending(service.service_id, name, lent=True, sentence=f"Lent: {', '.join(words)}.")


def _why_not(
    service: Service, gate: float | None, slots: float | None, guest: float | None, serving: float | None
) -> str:
    """The first thing that stands in the way, "" if nothing does."""
    page = service.page
    if service.life is Life.STALE or page is None:
        return "the executor is silent; its guest shuts its own gate."
    for name in ("serving", "guest", "partition", "follower"):
        part = _part(page, name)
        if part is not None and part[0] not in _WELL and name in ("serving", "guest"):
            state, detail = part
            return f"{name} is {state}{f': {detail}' if detail else ''}."
    if gate is None:
        return "the executor's metrics do not answer."
    if gate == 0:
        busy = f"serving runs {serving:.0f} {'request' if serving == 1 else 'requests'} and " if serving else ""
        return f"the gate is shut: {busy}has no time to spare within its SLO."
    if not slots and not guest:
        part = _part(page, "scheduler")
        return f"the guest is not offered{f': scheduler is {part[0]}, {part[1]}' if part else ''}."
    return ""


def _part(page: Page, name: str) -> tuple[str, str] | None:
    return next(((part.state, part.detail) for part in page.parts if part.name == name), None)
