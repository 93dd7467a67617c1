"""What services are called where people read: their ids without what is there to keep them apart. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_ID = re.compile(r"(?P<name>.+)-\d{8}-\d{6}-(?P<tail>[0-9a-f]{4})")


def short_name(service_id: str) -> str:
    """`executor` for `executor-20260801-120000-ab12`; what is no such id stays as it is."""
    found = _ID.fullmatch(service_id)
    return found["name"] if found else service_id


def short_names(service_ids: Iterable[str]) -> dict[str, str]:
    """By id; with the last four of the id where two would have the same name."""
    ids = list(service_ids)
    often = Counter(map(short_name, ids))
    return {one: name if often[name := short_name(one)] == 1 else _told_apart(one) for one in ids}


def _told_apart(service_id: str) -> str:
    found = _ID.fullmatch(service_id)
    return f"{found['name']} {found['tail']}" if found else service_id
