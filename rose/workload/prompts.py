"""Prompts of made-up tokens, of the lengths that a trace gives.

Invariants
- The same trace, range and seed give the same prompts, in any order.
- Prompts share a prefix exactly as far as the trace says: requests whose block hashes begin alike begin with the same
  tokens, so that a prefix cache hits where it did; without hashes no two prompts are alike but by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import numpy as np

from rose.errors import ConfigError
from rose.workload.trace import Trace

_BLOCKS_KEPT = 4096


class Prompts:
    """`low` to `high` - 1 are the token ids to draw from: ordinary ones of the engine's vocabulary."""

    def __init__(self, trace: Trace, low: int, high: int, seed: int) -> None:
        if not 0 <= low < high:
            raise ConfigError(f"token ids from {low} to {high}", expected="a range like 100:1000 of ordinary tokens")
        self._trace = trace
        self._low = low
        self._high = high
        self._seed = seed
        self._block = lru_cache(_BLOCKS_KEPT)(self._drawn)

    def token_ids(self, index: int) -> list[int]:
        """The prompt of the request at `index`."""
        request = self._trace.requests[index]
        ids: list[int] = []
        for block, tokens in self._shared(index):
            ids += block[:tokens]
        missing = request.prompt_tokens - len(ids)
        return ids + self._drawn(0, index, missing) if missing > 0 else ids[: request.prompt_tokens]

    def _shared(self, index: int) -> Iterator[tuple[list[int], int]]:
        """Blocks and how much of each: a block of 0.5 tokens is there every other time."""
        size = self._trace.block_tokens
        end = self._trace.requests[index].prompt_tokens
        for at, block_hash in enumerate(self._trace.requests[index].prefix_blocks):
            first, last = ceil(at * size), ceil((at + 1) * size)
            if first >= end:
                return
            if last > first:
                yield self._block(1, block_hash % 2**64, ceil(size)), last - first

    def _drawn(self, kind: int, key: int, tokens: int) -> list[int]:
        random = np.random.default_rng((self._seed, kind, key))
        ids: list[int] = random.integers(self._low, self._high, tokens).tolist()
        return ids
