"""What an engine is asked to compute so that its steps can be profiled: a seeded grid. Pure.

Invariants
- Any beginning of the plan covers the whole grid as evenly as its length allows: who must stop early knows less of
  everything instead of nothing of something.
- No load needs more keys and values than the engine has, so no request is ever set back.
- No two prompts begin alike: what the engine has cached is never asked for again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_OUTPUT_TOKENS = 12
"""Of each request: decoding steps are cheap, and there are many of them."""
_LOAD_TOKENS_MAX = 16_384
"""Of all prompts of a load: larger ones take long and show nothing new."""
_PROMPT_GROWTH = 4
_FIRST_PROMPT_TOKENS = 2
_PASSES = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """What the engine that is profiled can do: sequences of 32 tokens or more. Its cache holds `kv_tokens`."""

    seqs_max: int
    context_tokens_max: int
    kv_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are sent at once: the tokens of each prompt, and how many to sample for each."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int


def plan(grid: Grid, seed: int) -> list[Load]:
    """Every cell (sequences, length of prompt) of the grid, twice, in an order of its own each time."""
    randomly = random.Random(seed)
    cells = [(seqs, tokens) for seqs in _seqs(grid) for tokens in _prompt_tokens(grid) if _fits(grid, seqs, tokens)]
    loads: list[Load] = []
    for _ in range(_PASSES):
        randomly.shuffle(cells)
        loads += [_load(grid, seqs, tokens, randomly) for seqs, tokens in cells]
    return loads


def _seqs(grid: Grid) -> Iterator[int]:
    seqs = 1
    while seqs < grid.seqs_max:
        yield seqs
        seqs *= 2
    yield grid.seqs_max


def _prompt_tokens(grid: Grid) -> Iterator[int]:
    longest = grid.context_tokens_max - _OUTPUT_TOKENS
    tokens = _FIRST_PROMPT_TOKENS
    while tokens < longest:
        yield tokens
        tokens *= _PROMPT_GROWTH
    yield longest


def _fits(grid: Grid, seqs: int, tokens: int) -> bool:
    return seqs * (tokens + _OUTPUT_TOKENS) <= grid.kv_tokens and seqs * tokens <= _LOAD_TOKENS_MAX


def _load(grid: Grid, seqs: int, tokens: int, randomly: random.Random) -> Load:
    # Of lengths that differ: else every sequence of a batch would reach each length in the same step.
    lengths = [randomly.randint(max(1, tokens // 2), tokens) for _ in range(seqs)]
    prompts = tuple(tuple(randomly.randrange(grid.vocab_size) for _ in range(length)) for length in lengths)
    return Load(prompts, _OUTPUT_TOKENS)
