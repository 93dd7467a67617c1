"""What an engine's step has to do, in three numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """`tokens` are computed in the step, for `seqs` sequences of it, which together have `context_tokens` behind them.

    Those were computed in earlier steps: their keys and values are what this one reads. Not counted are the tokens that
    the new ones of a prompt have before them in the same step; to count them fitted recorded steps worse.
    """

    tokens: int
    seqs: int = 1
    context_tokens: int = 0
