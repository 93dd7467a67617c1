"""Converters between `rose.records` and their wire messages; exact in both directions.

Every function raises ValueError on a message that no record can be made of (an unset enum, lengths that do
not fit together).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from rose import records
from rose.proto.v1 import records_pb2 as wire

E = TypeVar("E", bound=StrEnum)

_FINISH: Mapping[records.Finish, wire.Finish] = {
    records.Finish.STOP: wire.FINISH_STOP,
    records.Finish.LENGTH: wire.FINISH_LENGTH,
    records.Finish.ABORT: wire.FINISH_ABORT,
}
_PURPOSE: Mapping[records.Purpose, wire.Purpose] = {
    records.Purpose.TRAIN: wire.PURPOSE_TRAIN,
    records.Purpose.EVALUATION: wire.PURPOSE_EVALUATION,
}
_OUTCOME: Mapping[records.Outcome, wire.Outcome] = {
    records.Outcome.COMPLETED: wire.OUTCOME_COMPLETED,
    records.Outcome.TRUNCATED: wire.OUTCOME_TRUNCATED,
    records.Outcome.ENVIRONMENT_FAILED: wire.OUTCOME_ENVIRONMENT_FAILED,
    records.Outcome.ABORTED: wire.OUTCOME_ABORTED,
}


def _record_of(number: int, table: Mapping[E, int]) -> E:
    for member, value in table.items():
        if value == number:
            return member
    raise ValueError(f"{number} stands for no {type(next(iter(table))).__name__}")


def turn_to_wire(turn: records.Turn) -> wire.Turn:
    return wire.Turn(
        context_ids=turn.context_ids,
        output_ids=turn.output_ids,
        logprobs=turn.logprobs,
        versions=[wire.VersionSpan(version=s.version, start=s.start, end=s.end) for s in turn.versions],
        finish=_FINISH[turn.finish],
        starts_segment=turn.starts_segment,
        requests=[
            wire.RequestPart(engine_id=p.engine_id, request_id=p.request_id, tokens=p.tokens) for p in turn.requests
        ],
    )


def turn_from_wire(message: wire.Turn) -> records.Turn:
    return records.Turn(
        context_ids=tuple(message.context_ids),
        output_ids=tuple(message.output_ids),
        logprobs=tuple(message.logprobs),
        versions=tuple(records.VersionSpan(s.version, s.start, s.end) for s in message.versions),
        finish=_record_of(message.finish, _FINISH),
        starts_segment=message.starts_segment,
        requests=tuple(records.RequestPart(p.engine_id, p.request_id, p.tokens) for p in message.requests),
    )


def segment_to_wire(segment: records.Segment) -> wire.Segment:
    return wire.Segment(
        token_ids=segment.token_ids,
        outputs=[wire.OutputRange(start=start, end=end) for start, end in segment.outputs],
        logprobs=segment.logprobs,
        versions=segment.versions,
    )


def segment_from_wire(message: wire.Segment) -> records.Segment:
    outputs = tuple((span.start, span.end) for span in message.outputs)
    sampled = sum(end - start for start, end in outputs)
    if not len(message.logprobs) == len(message.versions) == sampled:
        raise ValueError(
            f"{sampled} sampled tokens with {len(message.logprobs)} log-probs and {len(message.versions)} versions"
        )
    return records.Segment(tuple(message.token_ids), outputs, tuple(message.logprobs), tuple(message.versions))


def trajectory_to_wire(trajectory: records.Trajectory) -> wire.Trajectory:
    return wire.Trajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        task_seed=trajectory.task_seed,
        purpose=_PURPOSE[trajectory.purpose],
        turns=[turn_to_wire(turn) for turn in trajectory.turns],
        reward=trajectory.reward,
        success=trajectory.success,
        outcome=_OUTCOME[trajectory.outcome],
        malformed_actions=trajectory.malformed_actions,
        failure=trajectory.failure,
        failed_at=trajectory.failed_at,
    )


def trajectory_from_wire(message: wire.Trajectory) -> records.Trajectory:
    return records.Trajectory(
        trajectory_id=message.trajectory_id,
        group_id=message.group_id,
        task_seed=message.task_seed,
        purpose=_record_of(message.purpose, _PURPOSE),
        turns=tuple(turn_from_wire(turn) for turn in message.turns),
        reward=message.reward,
        success=message.success,
        outcome=_record_of(message.outcome, _OUTCOME),
        malformed_actions=message.malformed_actions,
        failure=message.failure,
        failed_at=message.failed_at,
    )


def group_to_wire(group: records.Group) -> wire.Group:
    return wire.Group(group_id=group.group_id, trajectories=[trajectory_to_wire(t) for t in group.trajectories])


def group_from_wire(message: wire.Group) -> records.Group:
    return records.Group(message.group_id, tuple(trajectory_from_wire(t) for t in message.trajectories))
