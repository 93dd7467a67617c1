"""What the page says of each run and of each service, as plain data.

- Times are sent as they are, never as ages: what has not changed is not sent again.
- Texts are sent as they are: the page escapes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.dashboard.names import of_figure
from rose.ledger import Account
from rose.observer.measures import SeriesKey, Source
from rose.observer.services import Life, Service
from rose.status import Page, alike, whom

_WAITS_MAX = 50
_PARTS_MAX = 100


def runs(
    services: Mapping[str, Service],
    latest: Mapping[SeriesKey, float],
    told: Mapping[SeriesKey, float],
    names: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Every service that says steps, in order: of one that runs the `latest` figures, of another the last it `told`."""
    return [
        _run(service, service.page, services, latest if service.runs else told, names)
        for service in services.values()
        if service.page is not None and "steps" in service.page.facts
    ]


def _run(
    service: Service,
    page: Page,
    services: Mapping[str, Service],
    latest: Mapping[SeriesKey, float],
    names: Mapping[str, str],
) -> dict[str, Any]:
    own = Source(service.service_id)
    version = page.facts.get("version")
    accounts = {key.label: value for key, value in latest.items() if key.source == own and key.figure == "account"}
    return {
        "id": service.service_id,
        "name": names.get(service.service_id, service.service_id),
        "life": service.life,
        "step": page.facts.get("step"),
        "steps": page.facts.get("steps"),
        "version": version,
        "success": {
            key.label: round(value, 4) for key, value in latest.items() if key.source == own and key.figure == "success"
        },
        "engines": [
            {**engine, "lag": _lag(version, engine["version"])}
            for engine in [
                *_own_engines(service, page, latest),
                *_lent_engines(page, services, latest, names),
            ]
        ],
        "accounts": [[account, accounts[account]] for account in Account if account in accounts],
        "generated": latest.get(SeriesKey(own, "generated")),
        "gap": latest.get(SeriesKey(own, "gap")),
    }


def _lag(newest: object, version: float | None) -> int | None:
    return None if not isinstance(newest, int) or version is None else max(0, newest - int(version))


def _own_engines(service: Service, page: Page, latest: Mapping[SeriesKey, float]) -> list[dict[str, Any]]:
    own = Source(service.service_id)
    states = {part.name: part.state for part in page.parts}
    return [
        {
            "name": key.label,
            "kind": "dedicated",
            "state": states.get(key.label, ""),
            "version": version,
            "tokens_s": _rounded(latest.get(SeriesKey(Source(service.service_id, key.label), "engine tokens"))),
        }
        for key, version in of_figure(latest, "version").items()
        if key.source == own
    ]


def _lent_engines(
    page: Page,
    services: Mapping[str, Service],
    latest: Mapping[SeriesKey, float],
    names: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Those of the executors that name this run's scheduler."""
    scheduler = page.facts.get("scheduler")
    found = []
    for key, version in of_figure(latest, "guest version").items():
        executor = services.get(key.source.service)
        if executor is None or executor.page is None or executor.page.facts.get("scheduler") != scheduler:
            continue
        found.append(
            {
                "name": names.get(key.source.service, key.source.service),
                "kind": "lent",
                "state": next((part.state for part in executor.page.parts if part.name == "guest"), ""),
                "version": version,
                "tokens_s": _rounded(latest.get(SeriesKey(key.source, "guest tokens"))),
            }
        )
    return found


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def service_row(service: Service, problems: Mapping[Source, str], names: Mapping[str, str]) -> dict[str, Any]:
    """`since_s` is when it was last heard of, told only of one that is silent or gone."""
    page = service.page
    row: dict[str, Any] = {
        "id": service.service_id,
        "name": names.get(service.service_id, service.service_id),
        "life": service.life,
        "problem": service.problem,
        "unanswered": [
            f"{source.target or 'metrics'}: {problem}"
            for source, problem in sorted(problems.items(), key=lambda one: one[0].target)
            if source.service == service.service_id
        ],
    }
    if page is None:
        return row
    return row | {
        "pid": page.pid,
        "output": page.output,
        "started_s": round(page.started_s, 1),
        "heard_s": None if service.life is Life.LIVE else round(page.written_s, 1),
        "facts": [[key, value] for key, value in page.facts.items()],
        "parts": [
            {"name": part.name, "state": part.state, "detail": part.detail, "since_s": round(part.since_s, 1)}
            for part in page.parts[:_PARTS_MAX]
        ],
        "waits": [
            {
                "what": group[0].what,
                "whom": whom(group),
                "since_s": round(group[0].since_s, 1),
                "deadline_s": round(min(wait.deadline_s for wait in group), 1),
            }
            for group in alike(page.waits)[:_WAITS_MAX]
        ],
    }
