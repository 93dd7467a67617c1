"""Turns tile their version spans; segments keep tokens and log-probs exactly and split where a prefix breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.records import Finish, Outcome, Purpose, Trajectory, Turn, VersionSpan


def turn(context: list[int], outputs: list[int], *, version: int = 1, starts_segment: bool = False) -> Turn:
    spans = (VersionSpan(version, 0, len(outputs)),) if outputs else ()
    return Turn(
        context_ids=tuple(context),
        output_ids=tuple(outputs),
        logprobs=tuple(-0.5 - 0.01 * i for i in range(len(outputs))),
        versions=spans,
        finish=Finish.STOP,
        starts_segment=starts_segment,
    )


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory("t", "g", 0, Purpose.TRAIN, turns, 0.0, False, Outcome.COMPLETED)


turns_strategy = st.lists(
    st.builds(
        turn,
        st.lists(st.integers(0, 400), max_size=5),
        st.lists(st.integers(0, 400), max_size=5),
        version=st.integers(0, 9),
        starts_segment=st.booleans(),
    ),
    max_size=8,
)


@given(turns_strategy)
def test_segments_keep_every_token_in_order(turns: list[Turn]) -> None:
    segments = trajectory(*turns).segments()
    tokens = [token for segment in segments for token in segment.token_ids]
    assert tokens == [token for each in turns for token in (*each.context_ids, *each.output_ids)]


@given(turns_strategy)
def test_output_positions_hold_exactly_the_sampled_tokens(turns: list[Turn]) -> None:
    segments = trajectory(*turns).segments()
    sampled = [
        token for segment in segments for start, end in segment.outputs for token in segment.token_ids[start:end]
    ]
    assert sampled == [token for each in turns for token in each.output_ids]
    logprobs = [value for segment in segments for value in segment.logprobs]
    assert logprobs == [value for each in turns for value in each.logprobs]
    versions = [version for segment in segments for version in segment.versions]
    assert versions == [each.versions[0].version for each in turns for _ in each.output_ids]


def test_a_broken_prefix_starts_a_new_segment() -> None:
    segments = trajectory(turn([1], [2]), turn([3], [4]), turn([9, 9], [5], starts_segment=True)).segments()
    assert [segment.token_ids for segment in segments] == [(1, 2, 3, 4), (9, 9, 5)]


def test_oldest_version_is_the_lowest_that_sampled_a_token() -> None:
    assert trajectory(turn([1], [2], version=7), turn([1], [2], version=5)).oldest_version == 5
    assert trajectory(turn([1], [])).oldest_version is None


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan(1, 0, 1),),
        (VersionSpan(1, 0, 3),),
        (VersionSpan(1, 1, 2),),
        (VersionSpan(1, 0, 2), VersionSpan(2, 1, 2)),
        (VersionSpan(1, 0, 0), VersionSpan(2, 0, 2)),
    ],
)
def test_spans_that_do_not_tile_the_outputs_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(ValueError, match="tile"):
        Turn((), (4, 5), (-0.1, -0.2), spans, Finish.STOP)


def test_a_missing_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match="2 output tokens with 1 log-probs"):
        Turn((), (4, 5), (-0.1,), (VersionSpan(1, 0, 2),), Finish.STOP)
