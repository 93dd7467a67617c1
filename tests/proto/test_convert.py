"""Records survive the wire exactly, and a message that is no record is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.proto.convert import (
    group_from_wire,
    group_to_wire,
    segment_from_wire,
    segment_to_wire,
    trajectory_from_wire,
    trajectory_to_wire,
    turn_from_wire,
    turn_to_wire,
)
from rose.proto.generate import PROTO_DIR, generate
from rose.proto.v1 import records_pb2 as wire
from rose.records import Finish, Group, Outcome, Purpose, RequestPart, Trajectory, Turn, VersionSpan

ids = st.integers(0, 2**32 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
short = st.text(max_size=8)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    total, spans = 0, []
    for length in lengths:
        spans.append(VersionSpan(draw(st.integers(0, 2**63)), total, total + length))
        total += length
    return Turn(
        context_ids=tuple(draw(st.lists(ids, max_size=5))),
        output_ids=tuple(draw(st.lists(ids, min_size=total, max_size=total))),
        logprobs=tuple(draw(st.lists(finite, min_size=total, max_size=total))),
        versions=tuple(spans),
        finish=draw(st.sampled_from(Finish)),
        starts_segment=draw(st.booleans()),
        requests=tuple(draw(st.lists(st.builds(RequestPart, short, short, st.integers(0, 2**32 - 1)), max_size=2))),
    )


trajectories = st.builds(
    Trajectory,
    trajectory_id=short,
    group_id=short,
    task_seed=st.integers(-(2**63), 2**63 - 1),
    purpose=st.sampled_from(Purpose),
    turns=st.lists(turns(), max_size=3).map(tuple),
    reward=finite,
    success=st.booleans(),
    outcome=st.sampled_from(Outcome),
    malformed_actions=st.integers(0, 2**32 - 1),
    failure=short,
)


@given(turns())
def test_turns_survive(turn: Turn) -> None:
    assert turn_from_wire(wire.Turn.FromString(turn_to_wire(turn).SerializeToString())) == turn


@given(trajectories)
def test_trajectories_and_their_segments_survive(trajectory: Trajectory) -> None:
    data = trajectory_to_wire(trajectory).SerializeToString()
    assert trajectory_from_wire(wire.Trajectory.FromString(data)) == trajectory
    for segment in trajectory.segments():
        assert segment_from_wire(wire.Segment.FromString(segment_to_wire(segment).SerializeToString())) == segment


@given(st.builds(Group, short, st.lists(trajectories, max_size=3).map(tuple)))
def test_groups_survive(group: Group) -> None:
    assert group_from_wire(wire.Group.FromString(group_to_wire(group).SerializeToString())) == group


def test_a_logprob_travels_bit_for_bit() -> None:
    value = math.nextafter(-0.1, 0)
    turn = Turn((), (5,), (value,), (VersionSpan(0, 0, 1),), Finish.STOP)
    assert turn_from_wire(turn_to_wire(turn)).logprobs == (value,)


@pytest.mark.parametrize(
    "message",
    [
        wire.Turn(),
        wire.Turn(finish=wire.FINISH_STOP, output_ids=[1]),
        wire.Turn(finish=wire.FINISH_STOP, output_ids=[1], logprobs=[0.0]),
        wire.Turn(
            finish=wire.FINISH_STOP,
            output_ids=[1],
            logprobs=[0.0],
            versions=[wire.VersionSpan(version=1, start=0, end=2)],
        ),
    ],
)
def test_a_message_that_is_no_turn_is_refused(message: wire.Turn) -> None:
    with pytest.raises(ValueError, match=r"stands for no|log-probs|tile"):
        turn_from_wire(message)


def test_a_segment_with_missing_versions_is_refused() -> None:
    message = wire.Segment(token_ids=[1, 2], outputs=[wire.OutputRange(start=1, end=2)], logprobs=[0.0])
    with pytest.raises(ValueError, match="1 sampled tokens with 1 log-probs and 0 versions"):
        segment_from_wire(message)


def test_every_member_has_a_number_of_its_own() -> None:
    from rose.proto import convert

    tables = {Finish: convert._FINISH, Purpose: convert._PURPOSE, Outcome: convert._OUTCOME}
    for kind, table in tables.items():
        assert set(table) == set(kind)
        assert len(set(table.values())) == len(table)
        assert 0 not in table.values()


def test_the_committed_modules_are_what_the_compiler_makes(tmp_path: Path) -> None:
    generate(tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    root = PROTO_DIR.parents[2]
    committed = {path.relative_to(root): path.read_text() for path in PROTO_DIR.glob("*_pb2*.py*")}
    assert made == committed
