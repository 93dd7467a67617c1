"""What happens to weight versions, and what `rose.versions.VersionState` asks for in return.

`incarnation` tells the lives of one engine apart; it is new at every start. `order` numbers one Stage or
Commit, and its answer repeats it. An action is for one incarnation: whoever performs it and finds another
there answers that it failed, or, for Replace, has nothing left to do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A version is complete in the store; `fingerprint` is the hash of its content."""

    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A new incarnation of an engine is up, with `version` loaded whole."""

    engine_id: str
    incarnation: str
    version: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An incarnation of an engine is dead."""

    engine_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Staged:
    """The engine holds the ordered version beside its live weights, verified."""

    engine_id: str
    version: int
    order: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The engine does not hold the ordered version; its live weights are untouched."""

    engine_id: str
    version: int
    order: int
    why: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The engine runs the ordered version."""

    engine_id: str
    version: int
    order: int


@dataclass(frozen=True, slots=True)
class CommitUndone:
    """The commit failed and was taken back: the engine runs the version that it ran before, whole."""

    engine_id: str
    version: int
    order: int
    why: str


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The engine may hold a mixture; also the answer when no answer came in time."""

    engine_id: str
    version: int
    order: int
    why: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """`by` needs the version kept: an evaluation, an engine that starts from it."""

    version: int
    by: str


@dataclass(frozen=True, slots=True)
class Unpinned:
    """`by` needs the version no longer."""

    version: int
    by: str


VersionEvent = (
    Published
    | EngineJoined
    | EngineLost
    | Staged
    | StageFailed
    | Committed
    | CommitUndone
    | CommitFailed
    | Pinned
    | Unpinned
)


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch and verify `version` on the engine; answer Staged or StageFailed with this `order`."""

    engine_id: str
    incarnation: str
    version: int
    order: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Swap to the staged `version` between steps; answer Committed, CommitUndone or CommitFailed with this `order`."""

    engine_id: str
    incarnation: str
    version: int
    order: int


@dataclass(frozen=True, slots=True)
class Replace:
    """End this engine and start it again from the snapshot of `version`."""

    engine_id: str
    incarnation: str
    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Delete `version` from the store: nobody needs it."""

    version: int


VersionAction = Stage | Commit | Replace | Retire
