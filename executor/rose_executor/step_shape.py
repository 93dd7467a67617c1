"""What an engine's step has to do, in three numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """`tokens` are computed in the step, for `seqs` sequences; `context_tokens` are what those tokens attend to.

    A token attends to those before it in its sequence and to itself: a sequence that has `c` tokens behind it and gets
    `n` more in this step adds `n * c + n * (n + 1) / 2`. For one that decodes that is its length.
    """

    tokens: int
    seqs: int = 1
    context_tokens: int = 0


def attended(computed_tokens: int, tokens: int) -> int:
    """What one sequence adds to `context_tokens`: it has so many tokens behind it, and gets so many."""
    return tokens * computed_tokens + tokens * (tokens + 1) // 2
