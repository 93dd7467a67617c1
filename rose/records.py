"""What a rollout produced: turns, trajectories, token segments, groups.

Invariants
- Token ids and log-probs are kept exactly as the engine sampled them; nothing here decodes or encodes text.
- Masks come from lengths alone: a turn's `context_ids` are never trained, its `output_ids` always may be.
- Every output token carries exactly one weight version: the spans of a turn tile its outputs without gap or overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Finish(StrEnum):
    """Why an engine stopped sampling a turn."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Purpose(StrEnum):
    """What a trajectory is for; evaluation and probe tokens are never trained."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Outcome(StrEnum):
    """How a trajectory ended. Only COMPLETED ones may be trained."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ENVIRONMENT_FAILED = "environment-failed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Outputs `start` (inclusive) to `end` (exclusive) of a turn were sampled under weight `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RequestPart:
    """One engine request that contributed `tokens` outputs to a turn (several after a lost engine)."""

    engine_id: str
    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: `context_ids` were put before the model, `output_ids` came back.

    `logprobs[i]` is the natural log of the probability with which `output_ids[i]` was sampled.
    `starts_segment` says that the rendered prefix did not extend the tokens so far, so `context_ids`
    is a whole new prefix rather than a continuation.

    Raises ValueError if lengths differ or the version spans do not tile the outputs.
    """

    context_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    starts_segment: bool = False
    requests: tuple[RequestPart, ...] = ()

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.output_ids):
            raise ValueError(f"{len(self.output_ids)} output tokens with {len(self.logprobs)} log-probs")
        at = 0
        for span in self.versions:
            if span.start != at or span.end <= span.start:
                raise ValueError(f"version spans {self.versions} do not tile {len(self.output_ids)} outputs")
            at = span.end
        if at != len(self.output_ids):
            raise ValueError(f"version spans {self.versions} do not tile {len(self.output_ids)} outputs")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in which every turn's prefix extends the one before: what a trainer packs as one row.

    `outputs` are (start, end) positions of sampled tokens in `token_ids`, in order; `logprobs` and
    `versions` have one entry per sampled token, in the same order.
    """

    token_ids: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode of one task, from reset to its end.

    `reward` is the sum that training uses, `success` the task's own verdict. Two trajectories with the
    same `group_id` attempted the same task (`task_seed`). `failure` says in words why it did not complete, `failed_at`
    at which boundary, as errors name it; both are "" if it did.
    """

    trajectory_id: str
    group_id: str
    task_seed: int
    purpose: Purpose
    turns: tuple[Turn, ...]
    reward: float
    success: bool
    outcome: Outcome
    malformed_actions: int = 0
    failure: str = ""
    failed_at: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """Lowest weight version that sampled any token here, None if nothing was sampled."""
        return min((span.version for turn in self.turns for span in turn.versions), default=None)

    def segments(self) -> tuple[Segment, ...]:
        """Split at every turn whose prefix does not extend the tokens so far."""
        done: list[Segment] = []
        open_: _OpenSegment | None = None
        for turn in self.turns:
            if open_ is None or turn.starts_segment:
                if open_ is not None:
                    done.append(open_.close())
                open_ = _OpenSegment()
            open_.extend(turn)
        if open_ is not None:
            done.append(open_.close())
        return tuple(done)


@dataclass(slots=True)
class _OpenSegment:
    token_ids: list[int] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def extend(self, turn: Turn) -> None:
        self.token_ids.extend(turn.context_ids)
        start = len(self.token_ids)
        self.token_ids.extend(turn.output_ids)
        if turn.output_ids:
            self.outputs.append((start, len(self.token_ids)))
        self.logprobs.extend(turn.logprobs)
        for span in turn.versions:
            self.versions.extend([span.version] * (span.end - span.start))

    def close(self) -> Segment:
        return Segment(tuple(self.token_ids), tuple(self.outputs), tuple(self.logprobs), tuple(self.versions))


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one task; advantages are relative to the group's mean."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
