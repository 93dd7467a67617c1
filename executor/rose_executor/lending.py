"""How many requests a guest may be given now. Pure.

board, serving, guest                             slots
the board cannot be read or written               none
serving unknown                                   none
the guest is asleep or gone                       none: it computes nothing
the guest is frozen                               none
somebody else has stopped a process of it         none
no look has found slack for more than SHUT_S      none: what it was given would stand still
otherwise                                         as many as its admission lets run at once, `slots_max` at most
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rose_executor.guest_presence import Presence
from rose_executor.guest_rules import PATIENCE_S, GuestRules, Looked

SHUT_S = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Room:
    """What a guest has for requests now: slots, and which shares of its keys and values are used, and may be."""

    slots: int
    kv_used_fraction: float
    kv_fraction: float


@dataclass(frozen=True, slots=True)
class Lent:
    """`why` says in words why there are no `slots`, "" where there are."""

    slots: int
    why: str


def lent(
    seen: Looked | None, trouble: str, rules: GuestRules, stopped: Collection[int], slots_max: int, now_s: float
) -> Lent:
    """From the watch's last look, what that failed at, and the rules that it follows, at `now_s` of their clock.

    `stopped` are the guest's processes that were found to stand still.
    """
    if trouble:
        return Lent(0, trouble)
    if seen is None or rules.quota is None:
        return Lent(0, "nobody has looked at the board yet")
    if seen.serving.state is None:
        return Lent(0, f"the serving engine cannot be seen: {seen.serving.why}")
    if rules.kv.presence is not Presence.ACTIVE:
        return Lent(0, f"the guest is {rules.kv.presence}: there is no memory for it")
    if rules.frozen:
        return Lent(0, f"the guest is frozen: {rules.frozen}")
    if stopped:
        processes = ", ".join(map(str, stopped))
        return Lent(
            0, f"the guest stands still: somebody has stopped or traces process {processes}; SIGCONT ends a stop"
        )
    if rules.tight_since_s is not None and now_s - rules.tight_since_s > SHUT_S:
        return Lent(0, f"serving leaves no slack, for {now_s - rules.tight_since_s:.0f} s now")
    return Lent(min(slots_max, rules.seqs_allowed), "")
