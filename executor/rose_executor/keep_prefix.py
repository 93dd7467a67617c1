"""What a request tells its engine of cached prefixes, in its sampling parameters' `extra_args`. Pure.

Invariant
- What is read is its client's word: what makes no sense in it is left out, and nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

EXTRA_ARG = "rose"
SECONDS_MAX = 3600.0
FORGET_MAX = 1024
_NAME_CHARS_MAX = 256
_RANK_MAX = 2**53


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep what this request leaves in the cache under `name` ("" for not at all), and forget what `forget` names.

    It is kept for `seconds` at most, and where there is not enough memory for all, those of lower `rank` longest.
    """

    name: str = ""
    rank: int = 0
    seconds: float = 0.0
    forget: tuple[str, ...] = ()

    def extra_args(self) -> dict[str, Any]:
        said = {"keep": self.name, "rank": self.rank, "seconds": self.seconds, "forget": list(self.forget)}
        return {EXTRA_ARG: said}


def read_keep(extra_args: Mapping[str, Any] | None) -> Keep:
    said = (extra_args or {}).get(EXTRA_ARG)
    if not isinstance(said, Mapping):
        return Keep()
    name, rank, seconds, names = said.get("keep"), said.get("rank"), said.get("seconds"), said.get("forget")
    forget = tuple(filter(_is_name, names))[:FORGET_MAX] if isinstance(names, list | tuple) else ()
    if not _is_name(name) or not isinstance(rank, int) or not 0 <= rank <= _RANK_MAX:
        return Keep(forget=forget)
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return Keep(forget=forget)
    return Keep(name, rank, float(min(seconds, SECONDS_MAX)), forget)


def _is_name(said: Any) -> TypeGuard[str]:
    return isinstance(said, str) and 0 < len(said) <= _NAME_CHARS_MAX
