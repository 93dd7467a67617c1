"""What a serving vLLM says of itself on its own Prometheus page: the few figures that are needed, found by name. Pure.

Invariants
- No page raises, however odd: what is missing or makes no sense is None.
- Reading takes time in proportion to the page, about a millisecond for a whole one: it is not parsed, only searched.
- A page may tell of several engines; they count as one: requests and sums are added, the fullest cache is taken.

The names are those of vLLM 0.30 and 0.32. `iteration_tokens_total` is a histogram over steps, in spite of its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = "iteration_tokens_total"
_TOKEN_S = "inter_token_latency_seconds"
_FIRST_TOKEN_S = "time_to_first_token_seconds"
_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *(f"{histogram}_{part}" for histogram in (_STEPS, _TOKEN_S, _FIRST_TOKEN_S) for part in ("sum", "count")),
)
# A quoted label may hold a brace. Nothing is matched over the end of a line, nor tried twice.
_SAMPLE = re.compile(
    rb"^vllm:(" + "|".join(_NAMES).encode() + rb")"
    rb'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\[^\n])*+")*+)\})?+[ \t]++([-+.0-9eE]++|NaN|[-+]?Inf)(?=[ \t\r\n]|$)',
    re.MULTILINE,
)
_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="([0-9]{1,15})"')
_FIGURE_MAX = 2.0**53
_BATCHES_MAX = 2**20
"""More requests than any engine has."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A histogram's sum and count, which only grow as long as the engine lives."""

    total: float
    count: float


@dataclass(frozen=True, slots=True)
class PageFigures:
    """One page. `running` and `waiting` are requests, `kv_usage` is a share of `kv_blocks`, from 0 to 1.

    `steps` sums the tokens computed in each step, `token_s` the seconds between a request's tokens, `first_token_s`
    those from a request's arrival to its first token.
    """

    running: int
    waiting: int
    kv_usage: float | None = None
    kv_blocks: int | None = None
    steps: Sum | None = None
    token_s: Sum | None = None
    first_token_s: Sum | None = None


def read_page(page: bytes) -> PageFigures | None:
    """None where the page does not say how many requests run and wait: then it says nothing."""
    values: dict[str, list[float]] = {name: [] for name in _NAMES}
    blocks: list[int] = []
    for name, labels, value in _SAMPLE.findall(page):
        values[name.decode()].append(_number(value))
        if name == b"cache_config_info" and (found := _BLOCKS.search(labels)):
            blocks.append(int(found[1]))
    running, waiting = _added(values["num_requests_running"]), _added(values["num_requests_waiting"])
    if running is None or waiting is None or not running + waiting <= _BATCHES_MAX:
        return None
    usage = max(values["kv_cache_usage_perc"], default=math.nan)
    return PageFigures(
        running=round(running),
        waiting=round(waiting),
        kv_usage=usage if 0 <= usage <= 1 else None,
        kv_blocks=max(blocks, default=None),
        steps=_sum(values, _STEPS),
        token_s=_sum(values, _TOKEN_S),
        first_token_s=_sum(values, _FIRST_TOKEN_S),
    )


def _sum(values: dict[str, list[float]], histogram: str) -> Sum | None:
    total, count = _added(values[f"{histogram}_sum"]), _added(values[f"{histogram}_count"])
    return None if total is None or count is None else Sum(total, count)


def _added(values: Sequence[float]) -> float | None:
    """None where there are none, or where one is no count."""
    total = sum(values)
    return total if values and all(value >= 0 for value in values) and total <= _FIGURE_MAX else None


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
