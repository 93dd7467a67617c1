from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import a_trajectory

from rose.records import Segment
from rose.trainer.batch import micro_batches, pad


def segment(length: int) -> Segment:
    return Segment(tuple(range(length)), ((length - 1, length),), (-1.0,), (1,))


def test_padding_points_every_output_at_the_token_before_it() -> None:
    two_turns = Segment((10, 11, 12, 13, 14, 15), ((2, 3), (4, 6)), (-0.1, -0.2, -0.3), (1, 1, 1))
    short = Segment((20, 21), ((1, 2),), (-0.4,), (1,))
    batch = pad([two_turns, short])
    assert batch.ids_BT.tolist() == [[10, 11, 12, 13, 14], [20, 0, 0, 0, 0]]
    assert batch.row_N.tolist() == [0, 0, 0, 1]
    assert batch.column_N.tolist() == [1, 3, 4, 0]
    assert batch.target_N.tolist() == [12, 14, 15, 21]
    assert batch.sampled_logprob_N.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert batch.sampled_logprob_N.dtype == torch.float32


def test_context_after_the_last_output_is_not_computed() -> None:
    trailing = Segment((1, 2, 3, 4, 5), ((1, 2),), (-1.0,), (1,))
    assert pad([trailing]).ids_BT.tolist() == [[1]]


def test_segments_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="without sampled"):
        pad([Segment((1, 2), (), (), ())])
    with pytest.raises(ValueError, match="first token"):
        pad([Segment((1, 2), ((0, 1),), (-1.0,), (1,))])


@given(st.lists(st.integers(2, 60), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_segment_once_and_keep_the_cap(lengths: list[int], cap: int) -> None:
    segments = [segment(length) for length in lengths]
    packed = micro_batches(segments, cap)
    assert sorted(index for batch in packed for index in batch) == list(range(len(segments)))
    for batch in packed:
        assert len(batch) == 1 or pad([segments[index] for index in batch]).ids_BT.numel() <= cap
    widths = [pad([segments[index] for index in batch]).ids_BT.shape[1] for batch in packed]
    assert widths == sorted(widths)


@given(st.integers(0, 1000))
def test_targets_are_the_sampled_tokens_in_order(seed: int) -> None:
    trajectory = a_trajectory(random.Random(seed), 0.0)
    outputs = [token for turn in trajectory.turns for token in turn.output_ids]
    assert pad(trajectory.segments()).target_N.tolist() == outputs
