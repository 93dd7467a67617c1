"""What an engine's step has to do, in three numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class StepShape(NamedTuple):
    """`tokens` are computed in the step, for `seqs` sequences of it, which together have `context_tokens` behind them.

    Those were computed in earlier steps: their keys and values are what this one reads. Not counted are the tokens that
    the new ones of a prompt have before them in the same step; to count them fitted recorded steps worse.
    """

    tokens: int
    seqs: int = 1
    context_tokens: int = 0


def scheduled_shape(requests: Mapping[str, Any], scheduled: Mapping[str, int]) -> StepShape:
    """Of what vLLM has just scheduled: new tokens by request id, of `requests` by id.

    vLLM counts the tokens of a step as computed as soon as it has scheduled them.
    """
    tokens = sum(scheduled.values())
    behind = sum([requests[one].num_computed_tokens for one in scheduled]) - tokens
    return StepShape(tokens, len(scheduled), behind)
