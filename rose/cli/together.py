"""Which services of a user belong together.

Invariants
- Nothing is guessed from names: services belong together where their pages say so, by an address that one serves and
  another has joined, by the run that one names, or by an output folder within the other's.
- Whatever is not told by a page stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rose.status import RunStatus

_ADDRESSES = ("address", "scheduler", "weights", "dashboard")


def together(statuses: Sequence[RunStatus]) -> list[list[RunStatus]]:
    """Groups in the order of their first members, members in the order given."""
    groups: list[list[RunStatus]] = []
    for status in statuses:
        joined = [group for group in groups if any(_joined(status, member) for member in group)]
        merged = [member for group in joined for member in group] + [status]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted(merged, key=statuses.index))
    return sorted(groups, key=lambda group: statuses.index(group[0]))


def _joined(one: RunStatus, other: RunStatus) -> bool:
    if one.page is None or other.page is None:
        return False
    if not set(_ties(one)).isdisjoint(_ties(other)):
        return True
    outputs = PurePath(one.page.output), PurePath(other.page.output)
    return outputs[0] in outputs[1].parents or outputs[1] in outputs[0].parents


def _ties(status: RunStatus) -> Iterator[tuple[str, str]]:
    """What a service serves or has joined. A scheduler's own address is what others call theirs."""
    assert status.page is not None
    yield "run", status.run_id
    for fact in ("run", *_ADDRESSES):
        value = status.page.facts.get(fact)
        if isinstance(value, str) and value:
            yield "run" if fact == "run" else "address", value
