"""What of the page's data has changed since the look before. Pure.

Invariant: a page that got one whole state and every increment after it holds what the next whole state would say. It
takes the sections that it is told in place of its own, and so the entries of the one that is sent by entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYED = "services"
"""The one section that is sent by its entries; None in place of an entry says that it is gone."""


def increment(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that differ."""
    changed = {name: section for name, section in after.items() if name != KEYED and before.get(name) != section}
    was, now = before.get(KEYED, {}), after[KEYED]
    entries = {key: entry for key, entry in now.items() if was.get(key) != entry}
    entries |= {key: None for key in was if key not in now}
    return changed | ({KEYED: entries} if entries else {})
