"""A serving trace: when requests arrived, and how long prompt and answer were.

Invariants
- Arrivals are finite, at least 0, never go back, and lie within the trace's length.
- Every prompt and every answer has at least one token.
- A trace is never changed: what cuts or scales it makes a new one, whose `history` says in words what was done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

TOKENS_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; `arrival_s` is in seconds from the beginning of its trace.

    `prefix_blocks` are the hashes of the prompt's blocks of tokens, first to last: prompts whose lists begin alike
    begin with the same tokens. Empty where the source tells nothing of contents.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"an arrival at {self.arrival_s} s; times are finite and never negative")
        if not 1 <= self.prompt_tokens <= TOKENS_MAX:
            raise ValueError(f"a prompt of {self.prompt_tokens} tokens, not 1 to {TOKENS_MAX}")
        if not 1 <= self.output_tokens <= TOKENS_MAX:
            raise ValueError(f"an answer of {self.output_tokens} tokens, not 1 to {TOKENS_MAX}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival within `length_s` seconds.

    `attribution` names source and licence, to be shown wherever the trace is. `block_tokens` is the size of a block
    of `prefix_blocks`: a fraction once prompts have been scaled, 0 where there are none. `history` says what was done
    to the original, in order.
    """

    name: str
    attribution: str
    requests: tuple[TraceRequest, ...]
    length_s: float
    block_tokens: float = 0.0
    history: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("a trace without requests")
        arrivals = [request.arrival_s for request in self.requests]
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError("requests that are not in order of arrival")
        if not (math.isfinite(self.length_s) and self.length_s >= arrivals[-1]):
            raise ValueError(f"a length of {self.length_s} s, and an arrival at {arrivals[-1]} s")
        if not (math.isfinite(self.block_tokens) and self.block_tokens >= 0):
            raise ValueError(f"prefix blocks of {self.block_tokens} tokens")
        if self.block_tokens == 0 and any(request.prefix_blocks for request in self.requests):
            raise ValueError("prefix blocks of no size")

    @property
    def rate_rps(self) -> float:
        """Mean requests per second; infinite if all arrive in a trace of no length."""
        return len(self.requests) / self.length_s if self.length_s > 0 else math.inf

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)


def in_order(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """By arrival; what arrives at the same moment keeps its order."""
    return tuple(sorted(requests, key=lambda request: request.arrival_s))
