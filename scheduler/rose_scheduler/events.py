"""What happens to engines and leases, and what `rose_scheduler.placement.Placement` answers.

`incarnation` tells the lives of one engine apart; it is new at every start. Times are seconds on the clock that
`step` is given; versions are weight versions. Each event of a caller is answered by exactly one action of its own:
EngineOffered, EngineBeat and EngineGone by EngineAnswered, LeaseEnded by EndAnswered, TrajectoryOver by OverAnswered,
LeaseAsked by Grant, Refuse or Expire, at the latest at its deadline; Cancelled by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rose.driver.core import After


class EngineKind(StrEnum):
    """DEDICATED engines belong to the run; LENT ones are guests on GPUs that serve."""

    DEDICATED = "dedicated"
    LENT = "lent"


class LeaseOutcome(StrEnum):
    """How a turn on a lease ended. After anything but DONE the engine is not trusted to hold the prefix."""

    DONE = "done"
    CUT = "cut"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Reason(StrEnum):
    """Why a lease is refused. FULL and CLOSING alone are worth another try with the same lease."""

    FULL = "full"
    CLOSING = "closing"
    ENDED = "ended"
    CONFLICT = "conflict"
    SUPERSEDED = "superseded"
    MALFORMED = "malformed"


class Lapse(StrEnum):
    """Why a lease is over that nobody ended: never placed in time, held for too long, or its engine is dead."""

    NOT_PLACED = "not placed"
    NOT_ENDED = "not ended"
    ENGINE_LOST = "engine lost"


class EndVerdict(StrEnum):
    """What the report of an end came to; only ENDED changed anything."""

    ENDED = "ended"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"


class Standing(StrEnum):
    """What an engine is told: UNKNOWN ones offer themselves anew; OVER, this incarnation is past; FULL, no room."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    OVER = "over"
    CONFLICT = "conflict"
    FULL = "full"


class Health(StrEnum):
    """See the state table of `rose_scheduler.engines`."""

    STARTING = "starting"
    HEALTHY = "healthy"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineOffered:
    """An engine is there; it gets traffic from its first beat on.

    `counts_address` is where its tokens are counted, empty where whoever samples on it can count them itself.
    """

    engine_id: str
    incarnation: str
    kind: EngineKind
    address: str
    max_requests: int
    weight_version: int
    counts_address: str = ""


@dataclass(frozen=True, slots=True)
class EngineBeat:
    """An engine lives. `slots_open`: requests that it may hold now, those that it has included; 0 is closed.

    `kv_tokens` is for how many tokens it has KV memory, and `token_s` how long it takes to compute one of a context;
    0 is unknown.
    """

    engine_id: str
    incarnation: str
    weight_version: int
    slots_open: int
    kv_used_fraction: float
    kv_tokens: int = 0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineGone:
    """This incarnation takes no more requests, and those that it had are lost."""

    engine_id: str
    incarnation: str
    why: str


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A turn wants an engine of at least `min_version`, before `deadline_s`, for at most `hold_s` seconds.

    `token` is what the holder will show to the engine; whoever makes the event draws it. Asked again with the same
    `lease_id`, the answer is the same. `avoid` are incarnations of engines on which it is not to be placed.
    `turn` counts from 0, `group_size` is how many trajectories its group has in all.
    """

    lease_id: str
    trajectory_id: str
    group_id: str
    turn: int
    context_tokens: int
    min_version: int
    deadline_s: float
    hold_s: float
    token: str = field(repr=False)
    avoid: tuple[str, ...] = ()
    group_size: int = 1
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class TrajectoryOver:
    """A trajectory takes no more turns, however it ended."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The turn is over; `tokens` were received."""

    lease_id: str
    outcome: LeaseOutcome
    tokens: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for the answer to this lease any more, and none was delivered."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer that the core asked for; `number` says which."""

    number: int


PlacementEvent = EngineOffered | EngineBeat | EngineGone | LeaseAsked | LeaseEnded | TrajectoryOver | Cancelled | Tick


@dataclass(frozen=True, slots=True)
class Grant:
    """The turn may be sent to `address` until `until_s`. `affine`: that engine holds the trajectory's prefix.

    The engine is to keep the prefix the longer, the lower `keep_rank` is.
    """

    lease_id: str
    trajectory_id: str
    engine_id: str
    incarnation: str
    address: str
    weight_version: int
    until_s: float
    affine: bool
    token: str = field(repr=False)
    counts_address: str = ""
    keep_rank: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """No lease. `what` in words; worth another try after `retry_after_s`, never if that is None."""

    lease_id: str
    reason: Reason
    what: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Expire:
    """A lease is over by itself; `what` in words."""

    lease_id: str
    trajectory_id: str
    lapse: Lapse
    what: str


@dataclass(frozen=True, slots=True)
class EndAnswered:
    """Answer to LeaseEnded; the trajectory is named if that changed anything."""

    lease_id: str
    verdict: EndVerdict
    trajectory_id: str = ""


@dataclass(frozen=True, slots=True)
class OverAnswered:
    """Answer to TrajectoryOver: ENDED, DUPLICATE, or UNKNOWN for one that is not remembered."""

    trajectory_id: str
    verdict: EndVerdict


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """Answer to EngineOffered, EngineBeat or EngineGone; `what` says why, where that is needed."""

    engine_id: str
    incarnation: str
    standing: Standing
    what: str = ""


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """News, for whoever watches."""

    engine_id: str
    incarnation: str
    health: Health
    why: str


PlacementAction = (
    Grant | Refuse | Expire | EndAnswered | OverAnswered | EngineAnswered | HealthChanged | After[PlacementEvent]
)
