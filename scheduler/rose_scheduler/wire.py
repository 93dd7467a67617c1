"""Between the scheduler's events and its wire messages, both ways.

Invariants
- What comes in is checked whole before it becomes an event: an event never holds what the core must not see.
- Times travel as durations, since no two machines have one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from rose.address import checked_url, host_and_port
from rose.errors import ConfigError
from rose.proto.v1 import scheduler_pb2 as wire
from rose_scheduler.events import (
    EndVerdict,
    EngineBeat,
    EngineGone,
    EngineKind,
    EngineOffered,
    Expire,
    Grant,
    LeaseAsked,
    LeaseEnded,
    LeaseOutcome,
    Reason,
    Refuse,
    Standing,
    TrajectoryOver,
)
from rose_scheduler.why import Why

E = TypeVar("E", bound=StrEnum)

TEXT_CHARS_MAX = 256
WAIT_MS_MAX = 86_400_000.0
REQUESTS_MAX = 65_536
TOKENS_MAX = 2**31
AVOIDED_MAX = 16
KV_TOKENS_MAX = 2**40
GROUP_MAX = 65_536

KINDS: Mapping[EngineKind, wire.EngineKind] = {
    EngineKind.DEDICATED: wire.ENGINE_KIND_DEDICATED,
    EngineKind.LENT: wire.ENGINE_KIND_LENT,
}
STANDINGS: Mapping[Standing, wire.EngineStanding] = {
    Standing.KNOWN: wire.ENGINE_STANDING_KNOWN,
    Standing.UNKNOWN: wire.ENGINE_STANDING_UNKNOWN,
    Standing.OVER: wire.ENGINE_STANDING_OVER,
    Standing.CONFLICT: wire.ENGINE_STANDING_CONFLICT,
    Standing.FULL: wire.ENGINE_STANDING_FULL,
}
REASONS: Mapping[Reason, wire.LeaseReason] = {
    Reason.FULL: wire.LEASE_REASON_FULL,
    Reason.CLOSING: wire.LEASE_REASON_CLOSING,
    Reason.ENDED: wire.LEASE_REASON_ENDED,
    Reason.CONFLICT: wire.LEASE_REASON_CONFLICT,
    Reason.SUPERSEDED: wire.LEASE_REASON_SUPERSEDED,
    Reason.MALFORMED: wire.LEASE_REASON_MALFORMED,
}
OUTCOMES: Mapping[LeaseOutcome, wire.LeaseOutcome] = {
    LeaseOutcome.DONE: wire.LEASE_OUTCOME_DONE,
    LeaseOutcome.CUT: wire.LEASE_OUTCOME_CUT,
    LeaseOutcome.FAILED: wire.LEASE_OUTCOME_FAILED,
    LeaseOutcome.ABANDONED: wire.LEASE_OUTCOME_ABANDONED,
}
VERDICTS: Mapping[EndVerdict, wire.EndVerdict] = {
    EndVerdict.ENDED: wire.END_VERDICT_ENDED,
    EndVerdict.DUPLICATE: wire.END_VERDICT_DUPLICATE,
    EndVerdict.LATE: wire.END_VERDICT_LATE,
    EndVerdict.UNKNOWN: wire.END_VERDICT_UNKNOWN,
}


class Malformed(ValueError):
    """A message that no event can be made of; says which field, and what it must be."""


def member_of(number: int, table: Mapping[E, int]) -> E:
    """Which member a number on the wire stands for. Raises Malformed."""
    for member, value in table.items():
        if value == number:
            return member
    raise Malformed(f"{number} stands for no {type(next(iter(table))).__name__}")


def offered(message: Any) -> EngineOffered:
    """Raises Malformed, as all of these do."""
    if message.kind == KINDS[EngineKind.LENT] and not message.counts_address:
        raise Malformed("counts_address is empty: nobody could count what a lent engine samples")
    return EngineOffered(
        _text("engine_id", message.engine_id),
        _text("incarnation", message.incarnation),
        member_of(message.kind, KINDS),
        _dialable("address", message.address, checked_url),
        _whole("max_requests", message.max_requests, 1, REQUESTS_MAX),
        _version("weight_version", message.weight_version),
        _dialable("counts_address", message.counts_address, host_and_port) if message.counts_address else "",
    )


def beat(message: Any) -> EngineBeat:
    return EngineBeat(
        _text("engine_id", message.engine_id),
        _text("incarnation", message.incarnation),
        _version("weight_version", message.weight_version),
        message.slots_open,
        _number("kv_used_fraction", message.kv_used_fraction, 0.0, 1.0),
        _whole("kv_tokens", message.kv_tokens, 0, KV_TOKENS_MAX),
        _number("token_ms", message.token_ms, 0.0, WAIT_MS_MAX) / 1000,
    )


def gone(message: Any) -> EngineGone:
    return EngineGone(
        _text("engine_id", message.engine_id), _text("incarnation", message.incarnation), _text("why", message.why)
    )


def asked(message: Any, now: float, token: str) -> LeaseAsked:
    return LeaseAsked(
        _text("lease_id", message.lease_id),
        _text("trajectory_id", message.trajectory_id),
        _text("group_id", message.group_id),
        message.turn,
        message.context_tokens,
        _version("min_version", message.min_version),
        now + _number("wait_ms", message.wait_ms, 0.0, WAIT_MS_MAX) / 1000,
        _number("hold_ms", message.hold_ms, 1.0, WAIT_MS_MAX) / 1000,
        token,
        _avoided(message.avoid),
        _whole("group_size", message.group_size or 1, 1, GROUP_MAX),
        message.evaluation,
    )


def trajectory_over(message: Any) -> TrajectoryOver:
    return TrajectoryOver(_text("trajectory_id", message.trajectory_id))


def ended(message: Any) -> LeaseEnded:
    return LeaseEnded(
        _text("lease_id", message.lease_id),
        member_of(message.outcome, OUTCOMES),
        _whole("tokens", message.tokens, 0, TOKENS_MAX),
    )


def ask_reply(answer: Grant | Refuse | Expire, now: float) -> Any:
    match answer:
        case Grant():
            return wire.AskLeaseReply(
                grant=wire.LeaseGrant(
                    engine_id=answer.engine_id,
                    incarnation=answer.incarnation,
                    address=answer.address,
                    weight_version=answer.weight_version,
                    hold_ms=max(0.0, answer.until_s - now) * 1000,
                    token=answer.token,
                    affine=answer.affine,
                    counts_address=answer.counts_address,
                    keep_rank=answer.keep_rank,
                )
            )
        case Refuse():
            again_ms = None if answer.retry_after_s is None else answer.retry_after_s * 1000
            refusal = wire.LeaseRefusal(reason=REASONS[answer.reason], what=answer.what, retry_after_ms=again_ms)
            return wire.AskLeaseReply(refusal=refusal)
        case Expire():
            return wire.AskLeaseReply(lapse=wire.LeaseLapse(what=answer.what))


def why_reply(why: Why | None) -> Any:
    if why is None:
        return wire.WhyReply(known=False)
    return wire.WhyReply(
        known=True,
        trajectory_id=why.trajectory_id,
        group_id=why.group_id,
        stand=why.stand,
        lease_id=why.lease_id,
        waits_for=why.waits_for,
        for_ms=why.for_s * 1000,
        left_ms=None if why.left_s is None else why.left_s * 1000,
        history=[
            wire.Happening(
                ago_ms=(why.now_s - one.at_s) * 1000, what=one.what, lease_id=one.lease_id, engine_id=one.engine_id
            )
            for one in why.history
        ],
    )


def _avoided(incarnations: Sequence[str]) -> tuple[str, ...]:
    if len(incarnations) > AVOIDED_MAX:
        raise Malformed(f"avoid holds {len(incarnations)} incarnations, not {AVOIDED_MAX} at most")
    return tuple(_text("avoid", one) for one in incarnations)


def _text(field: str, text: str) -> str:
    if not 0 < len(text) <= TEXT_CHARS_MAX or not text.isprintable():
        raise Malformed(f"{field} is {text[:40]!r}, not 1 to {TEXT_CHARS_MAX} printable characters")
    return text


def _dialable(field: str, text: str, check: Callable[[str], object]) -> str:
    """Whoever is given it dials it: what `check` refuses with ConfigError would end a turn, or a run's count."""
    try:
        check(_text(field, text))
    except ConfigError as error:
        raise Malformed(f"{field} is {text[:40]!r}, not {error.expected}") from None
    return text


def _whole(field: str, number: int, least: int, most: int) -> int:
    if not least <= number <= most:
        raise Malformed(f"{field} is {number}, not from {least} to {most}")
    return number


def _version(field: str, number: int) -> int:
    return _whole(field, number, 0, 2**63 - 1)


def _number(field: str, number: float, least: float, most: float) -> float:
    if not least <= number <= most:  # which no NaN is
        raise Malformed(f"{field} is {number}, not from {least:g} to {most:g}")
    return number
