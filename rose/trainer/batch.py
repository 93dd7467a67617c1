"""Segments to padded tensors, and many segments to micro-batches.

Invariants
- What is trained is decided by the lengths that a segment records, never by token values.
- Rows are padded on the right; the last token of a row predicts nothing and is left out of the input.
- Packing is deterministic, and every segment is in exactly one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.records import Segment

PAD_ID = 0
"""What padding holds; any id will do, since nothing attends to it and nothing is predicted from it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of at most T input tokens, and the N sampled tokens that they predict.

    `target_N[i]` was sampled after the token at (`row_N[i]`, `column_N[i]`) of `ids_BT`, with log-prob
    `sampled_logprob_N[i]`. Ids and indices are int64, log-probs float32.
    """

    ids_BT: Tensor
    row_N: Tensor
    column_N: Tensor
    target_N: Tensor
    sampled_logprob_N: Tensor


def pad(segments: Sequence[Segment]) -> Batch:
    """One batch of the given segments, in their order.

    Raises ValueError if a segment has no sampled token, or its first token is one (nothing predicts it).
    """
    inputs = [_input_ids(segment) for segment in segments]
    ids_BT = torch.full((len(inputs), max(map(len, inputs))), PAD_ID, dtype=torch.int64)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    for row, (segment, ids) in enumerate(zip(segments, inputs, strict=True)):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        for start, end in segment.outputs:
            rows.extend([row] * (end - start))
            columns.extend(range(start - 1, end - 1))
            targets.extend(segment.token_ids[start:end])
        logprobs.extend(segment.logprobs)
    return Batch(
        ids_BT,
        torch.tensor(rows),
        torch.tensor(columns),
        torch.tensor(targets),
        torch.tensor(logprobs, dtype=torch.float32),
    )


def micro_batches(segments: Sequence[Segment], max_tokens: int) -> list[list[int]]:
    """Indices of `segments` in micro-batches of at most `max_tokens` padded input tokens.

    Sorted by length first, so that rows of a micro-batch are about equally long. A segment longer than
    `max_tokens` is a micro-batch by itself.
    """
    lengths = [len(_input_ids(segment)) for segment in segments]
    order = sorted(range(len(segments)), key=lambda index: (lengths[index], index))
    packed: list[list[int]] = []
    for index in order:
        # Ascending order: this row is the longest so far, so it sets the width of the batch it joins.
        if packed and (len(packed[-1]) + 1) * lengths[index] <= max_tokens:
            packed[-1].append(index)
        else:
            packed.append([index])
    return packed


def _input_ids(segment: Segment) -> tuple[int, ...]:
    """Tokens up to the one that predicts the last sampled token."""
    if not segment.outputs:
        raise ValueError("a segment without sampled tokens cannot be trained")
    if segment.outputs[0][0] == 0:
        raise ValueError("the first token of a segment was sampled: nothing predicts it")
    return segment.token_ids[: segment.outputs[-1][1] - 1]
