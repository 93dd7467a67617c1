# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_KIND_UNSPECIFIED: _ClassVar[EngineKind]
    ENGINE_KIND_DEDICATED: _ClassVar[EngineKind]
    ENGINE_KIND_LENT: _ClassVar[EngineKind]

class EngineStanding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STANDING_UNSPECIFIED: _ClassVar[EngineStanding]
    ENGINE_STANDING_KNOWN: _ClassVar[EngineStanding]
    ENGINE_STANDING_UNKNOWN: _ClassVar[EngineStanding]
    ENGINE_STANDING_OVER: _ClassVar[EngineStanding]
    ENGINE_STANDING_CONFLICT: _ClassVar[EngineStanding]
    ENGINE_STANDING_FULL: _ClassVar[EngineStanding]
    ENGINE_STANDING_MALFORMED: _ClassVar[EngineStanding]

class LeaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_REASON_UNSPECIFIED: _ClassVar[LeaseReason]
    LEASE_REASON_FULL: _ClassVar[LeaseReason]
    LEASE_REASON_ENDED: _ClassVar[LeaseReason]
    LEASE_REASON_CONFLICT: _ClassVar[LeaseReason]
    LEASE_REASON_SUPERSEDED: _ClassVar[LeaseReason]
    LEASE_REASON_MALFORMED: _ClassVar[LeaseReason]
    LEASE_REASON_CLOSING: _ClassVar[LeaseReason]

class LeaseOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_OUTCOME_UNSPECIFIED: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_DONE: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_CUT: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_FAILED: _ClassVar[LeaseOutcome]
    LEASE_OUTCOME_ABANDONED: _ClassVar[LeaseOutcome]

class EndVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_VERDICT_UNSPECIFIED: _ClassVar[EndVerdict]
    END_VERDICT_ENDED: _ClassVar[EndVerdict]
    END_VERDICT_DUPLICATE: _ClassVar[EndVerdict]
    END_VERDICT_LATE: _ClassVar[EndVerdict]
    END_VERDICT_UNKNOWN: _ClassVar[EndVerdict]
    END_VERDICT_MALFORMED: _ClassVar[EndVerdict]
ENGINE_KIND_UNSPECIFIED: EngineKind
ENGINE_KIND_DEDICATED: EngineKind
ENGINE_KIND_LENT: EngineKind
ENGINE_STANDING_UNSPECIFIED: EngineStanding
ENGINE_STANDING_KNOWN: EngineStanding
ENGINE_STANDING_UNKNOWN: EngineStanding
ENGINE_STANDING_OVER: EngineStanding
ENGINE_STANDING_CONFLICT: EngineStanding
ENGINE_STANDING_FULL: EngineStanding
ENGINE_STANDING_MALFORMED: EngineStanding
LEASE_REASON_UNSPECIFIED: LeaseReason
LEASE_REASON_FULL: LeaseReason
LEASE_REASON_ENDED: LeaseReason
LEASE_REASON_CONFLICT: LeaseReason
LEASE_REASON_SUPERSEDED: LeaseReason
LEASE_REASON_MALFORMED: LeaseReason
LEASE_REASON_CLOSING: LeaseReason
LEASE_OUTCOME_UNSPECIFIED: LeaseOutcome
LEASE_OUTCOME_DONE: LeaseOutcome
LEASE_OUTCOME_CUT: LeaseOutcome
LEASE_OUTCOME_FAILED: LeaseOutcome
LEASE_OUTCOME_ABANDONED: LeaseOutcome
END_VERDICT_UNSPECIFIED: EndVerdict
END_VERDICT_ENDED: EndVerdict
END_VERDICT_DUPLICATE: EndVerdict
END_VERDICT_LATE: EndVerdict
END_VERDICT_UNKNOWN: EndVerdict
END_VERDICT_MALFORMED: EndVerdict

class RegisterEngineRequest(_message.Message):
    __slots__ = ("engine_id", "incarnation", "kind", "address", "max_requests", "weight_version", "counts_address")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    kind: EngineKind
    address: str
    max_requests: int
    weight_version: int
    counts_address: str
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., kind: _Optional[_Union[EngineKind, str]] = ..., address: _Optional[str] = ..., max_requests: _Optional[int] = ..., weight_version: _Optional[int] = ..., counts_address: _Optional[str] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("engine_id", "incarnation", "weight_version", "slots_open", "kv_used_fraction", "kv_tokens", "token_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_OPEN_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    weight_version: int
    slots_open: int
    kv_used_fraction: float
    kv_tokens: int
    token_ms: float
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., weight_version: _Optional[int] = ..., slots_open: _Optional[int] = ..., kv_used_fraction: _Optional[float] = ..., kv_tokens: _Optional[int] = ..., token_ms: _Optional[float] = ...) -> None: ...

class WithdrawEngineRequest(_message.Message):
    __slots__ = ("engine_id", "incarnation", "why")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    why: str
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class EngineReply(_message.Message):
    __slots__ = ("standing", "what")
    STANDING_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    standing: EngineStanding
    what: str
    def __init__(self, standing: _Optional[_Union[EngineStanding, str]] = ..., what: _Optional[str] = ...) -> None: ...

class LeaseCalls(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[LeaseCall]
    def __init__(self, calls: _Optional[_Iterable[_Union[LeaseCall, _Mapping]]] = ...) -> None: ...

class LeaseCall(_message.Message):
    __slots__ = ("call_id", "ask", "end", "give_up", "end_trajectory")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_FIELD_NUMBER: _ClassVar[int]
    END_TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    ask: AskLeaseRequest
    end: EndLeaseRequest
    give_up: GiveUpLease
    end_trajectory: EndTrajectoryRequest
    def __init__(self, call_id: _Optional[int] = ..., ask: _Optional[_Union[AskLeaseRequest, _Mapping]] = ..., end: _Optional[_Union[EndLeaseRequest, _Mapping]] = ..., give_up: _Optional[_Union[GiveUpLease, _Mapping]] = ..., end_trajectory: _Optional[_Union[EndTrajectoryRequest, _Mapping]] = ...) -> None: ...

class GiveUpLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndTrajectoryRequest(_message.Message):
    __slots__ = ("trajectory_id",)
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    def __init__(self, trajectory_id: _Optional[str] = ...) -> None: ...

class LeaseAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[LeaseAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[LeaseAnswer, _Mapping]]] = ...) -> None: ...

class LeaseAnswer(_message.Message):
    __slots__ = ("call_id", "asked", "ended", "given_up", "trajectory_ended")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ENDED_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    asked: AskLeaseReply
    ended: EndLeaseReply
    given_up: GiveUpLease
    trajectory_ended: EndLeaseReply
    def __init__(self, call_id: _Optional[int] = ..., asked: _Optional[_Union[AskLeaseReply, _Mapping]] = ..., ended: _Optional[_Union[EndLeaseReply, _Mapping]] = ..., given_up: _Optional[_Union[GiveUpLease, _Mapping]] = ..., trajectory_ended: _Optional[_Union[EndLeaseReply, _Mapping]] = ...) -> None: ...

class AskLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "trajectory_id", "group_id", "turn", "context_tokens", "min_version", "wait_ms", "hold_ms", "avoid", "group_size", "evaluation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    trajectory_id: str
    group_id: str
    turn: int
    context_tokens: int
    min_version: int
    wait_ms: float
    hold_ms: float
    avoid: _containers.RepeatedScalarFieldContainer[str]
    group_size: int
    evaluation: bool
    def __init__(self, lease_id: _Optional[str] = ..., trajectory_id: _Optional[str] = ..., group_id: _Optional[str] = ..., turn: _Optional[int] = ..., context_tokens: _Optional[int] = ..., min_version: _Optional[int] = ..., wait_ms: _Optional[float] = ..., hold_ms: _Optional[float] = ..., avoid: _Optional[_Iterable[str]] = ..., group_size: _Optional[int] = ..., evaluation: _Optional[bool] = ...) -> None: ...

class AskLeaseReply(_message.Message):
    __slots__ = ("grant", "refusal", "lapse")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LAPSE_FIELD_NUMBER: _ClassVar[int]
    grant: LeaseGrant
    refusal: LeaseRefusal
    lapse: LeaseLapse
    def __init__(self, grant: _Optional[_Union[LeaseGrant, _Mapping]] = ..., refusal: _Optional[_Union[LeaseRefusal, _Mapping]] = ..., lapse: _Optional[_Union[LeaseLapse, _Mapping]] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("engine_id", "incarnation", "address", "weight_version", "hold_ms", "token", "affine", "counts_address", "keep_rank")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    AFFINE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEEP_RANK_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    address: str
    weight_version: int
    hold_ms: float
    token: str
    affine: bool
    counts_address: str
    keep_rank: int
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., weight_version: _Optional[int] = ..., hold_ms: _Optional[float] = ..., token: _Optional[str] = ..., affine: _Optional[bool] = ..., counts_address: _Optional[str] = ..., keep_rank: _Optional[int] = ...) -> None: ...

class LeaseRefusal(_message.Message):
    __slots__ = ("reason", "what", "retry_after_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: LeaseReason
    what: str
    retry_after_ms: float
    def __init__(self, reason: _Optional[_Union[LeaseReason, str]] = ..., what: _Optional[str] = ..., retry_after_ms: _Optional[float] = ...) -> None: ...

class LeaseLapse(_message.Message):
    __slots__ = ("what",)
    WHAT_FIELD_NUMBER: _ClassVar[int]
    what: str
    def __init__(self, what: _Optional[str] = ...) -> None: ...

class EndLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "outcome", "tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    outcome: LeaseOutcome
    tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., outcome: _Optional[_Union[LeaseOutcome, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class EndLeaseReply(_message.Message):
    __slots__ = ("verdict", "what")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    verdict: EndVerdict
    what: str
    def __init__(self, verdict: _Optional[_Union[EndVerdict, str]] = ..., what: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "incarnation", "kind", "address", "health", "why", "weight_version", "leases", "slots", "kv_used_fraction", "silent_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    kind: EngineKind
    address: str
    health: str
    why: str
    weight_version: int
    leases: int
    slots: int
    kv_used_fraction: float
    silent_ms: float
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., kind: _Optional[_Union[EngineKind, str]] = ..., address: _Optional[str] = ..., health: _Optional[str] = ..., why: _Optional[str] = ..., weight_version: _Optional[int] = ..., leases: _Optional[int] = ..., slots: _Optional[int] = ..., kv_used_fraction: _Optional[float] = ..., silent_ms: _Optional[float] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("engines", "waiting", "held", "trajectories", "groups", "up_ms")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UP_MS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    waiting: int
    held: int
    trajectories: int
    groups: int
    up_ms: float
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., waiting: _Optional[int] = ..., held: _Optional[int] = ..., trajectories: _Optional[int] = ..., groups: _Optional[int] = ..., up_ms: _Optional[float] = ...) -> None: ...

class WhyRequest(_message.Message):
    __slots__ = ("some_id",)
    SOME_ID_FIELD_NUMBER: _ClassVar[int]
    some_id: str
    def __init__(self, some_id: _Optional[str] = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("ago_ms", "what", "lease_id", "engine_id")
    AGO_MS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ago_ms: float
    what: str
    lease_id: str
    engine_id: str
    def __init__(self, ago_ms: _Optional[float] = ..., what: _Optional[str] = ..., lease_id: _Optional[str] = ..., engine_id: _Optional[str] = ...) -> None: ...

class WhyReply(_message.Message):
    __slots__ = ("known", "trajectory_id", "group_id", "stand", "lease_id", "waits_for", "for_ms", "left_ms", "history")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    known: bool
    trajectory_id: str
    group_id: str
    stand: str
    lease_id: str
    waits_for: str
    for_ms: float
    left_ms: float
    history: _containers.RepeatedCompositeFieldContainer[Happening]
    def __init__(self, known: _Optional[bool] = ..., trajectory_id: _Optional[str] = ..., group_id: _Optional[str] = ..., stand: _Optional[str] = ..., lease_id: _Optional[str] = ..., waits_for: _Optional[str] = ..., for_ms: _Optional[float] = ..., left_ms: _Optional[float] = ..., history: _Optional[_Iterable[_Union[Happening, _Mapping]]] = ...) -> None: ...
