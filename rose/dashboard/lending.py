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
_LENT = "lent"
_HELD_BACK = "held back"
_UNREACHED = "no answer"


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
    executors = [one for one in services.values() if is_executor(one) and one.runs]
    if not executors:
        return [Lending("", "", lent=False, sentence=_NO_EXECUTOR)]
    return [_of(one, latest, names.get(one.service_id, one.service_id)) for one in executors]


def _of(service: Service, latest: Mapping[SeriesKey, float], name: str) -> Lending:
    def figure(what: str, label: str = "") -> float | None:
        return latest.get(SeriesKey(Source(service.service_id), what, label))

    why = _why_not(service)
    if why:
        return Lending(service.service_id, name, lent=False, sentence=f"Nothing is lent: {why}")
    gate, guest, slots, tokens_s = figure("gate"), figure("running", "guest"), figure("slots"), figure("guest tokens")
    words = []
    if gate is not None:
        words.append(f"the gate was open {share(gate)} of the last second")
    if guest is not None:
        words.append(f"the guest runs {guest:.0f} {'request' if guest == 1 else 'requests'}")
    if slots is not None:
        words.append(f"up to {slots:.0f} may be on it")
    if tokens_s is not None:
        words.append(f"{tokens_s:,.0f} tokens/s")
    return Lending(service.service_id, name, lent=True, sentence=f"Lent: {', '.join(words) or 'metrics to come'}.")


def _why_not(service: Service) -> str:
    """The first thing that stands in the way, in the executor's own words; "" if nothing does."""
    page = service.page
    if service.life is Life.STALE or page is None:
        return "its executor is silent, and without that the guest shuts its own gate."
    state, detail = _part(page, "guest") or ("", "")
    if state == _HELD_BACK:
        return f"{detail}."
    if state != _LENT:
        return f"the guest is not ready; it says: {', '.join(filter(None, (state, detail)))}."
    scheduler = _part(page, "scheduler")
    if scheduler is not None and scheduler[0] == _UNREACHED:
        return f"the scheduler does not answer. {scheduler[1]}".rstrip()
    return ""


def _part(page: Page, name: str) -> tuple[str, str] | None:
    return next(((part.state, part.detail) for part in page.parts if part.name == name), None)
