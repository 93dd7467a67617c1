"""What the executor does about its guest, each time it has looked at the board. Pure.

The guest itself asks for slack at the top of each of its steps (`guest_admission`); what is here says within which
quota, and guards it.

Invariants
- The quota is written whenever it changes, and at least every `HEARTBEAT_S` of the board: without that the guest shuts
  its own gate. So whatever ends the executor, nothing is left unthrottled.
- Serving unknown: the gate is shut. No slack at any look for `PATIENCE_S`: it is shut as well, until a look finds some.
- A guest that goes on computing although its gate has long been shut is frozen, and again if that did not stop it. It
  is thawed only to die: an engine that does not obey is to be replaced.

    gate                    guest, since                           action
    open, or just shut      -                                      quota on change or heartbeat
    shut for OBEY_S         ended no more than was under way       the same
    shut for OBEY_S         ended more, or any after a Freeze      Freeze, besides

Steps that were under way when the gate was shut are no disobedience, however late they end: beneath a busy serving
engine they may get next to no processor time for as long as it is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rose_executor.board_states import GuestState, Quota, Reading, ServingKv, ServingState
from rose_executor.guest_presence import Presence
from rose_executor.kv_budget import KvShare
from rose_executor.slack import SlackPolicy, slack_s
from rose_executor.step_profile import FIRST_TOKENS

OBEY_S = 1.0
"""A guest's longest step, by far, and the time until it takes the next quota."""
STEPS_UNDER_WAY = 2
"""At most so many steps of an engine are under way at once: with asynchronous scheduling, one behind another."""
PATIENCE_S = 0.5
LOOK_S = 0.02
_RENEW_S = 0.035

NO_SERVING_KV: Reading[ServingKv] = Reading(None, why="the serving engine gives no memory back")


@dataclass(frozen=True, slots=True)
class Looked:
    """What both engines' halves of the board said just now."""

    serving: Reading[ServingState]
    guest: Reading[GuestState]
    serving_kv: Reading[ServingKv] = NO_SERVING_KV


@dataclass(frozen=True, slots=True)
class Write:
    """Put this quota on the board."""

    quota: Quota


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop every process of the guest; `why` in words."""

    why: str


class GuestRules:
    """One guest. `kv` says how much memory it may have; `frozen` says why it was frozen, "" if not.

    `quota` is the last one written, None before the first; `shut_since_s` is since when its gate is shut, None while it
    is open; `tight_since_s` is since when no look has found any slack, None while looks do. `slack_s` is what the last
    look found, `seqs_allowed` how many requests the guest's own admission let run when it last let any: it says so only
    while it has some. Before that it is as many as a guest of which no step was seen may compute tokens.
    """

    def __init__(self, policy: SlackPolicy, kv: KvShare, move_after_s: float = 0.0) -> None:
        self.frozen = ""
        self.quota: Quota | None = None
        self.slack_s = 0.0
        self.seqs_allowed = min(FIRST_TOKENS, policy.seqs_max)
        self.shut_since_s: float | None = None
        self.tight_since_s: float | None = None
        self._policy = policy
        self.kv = kv
        self._move_after_s = move_after_s
        self._written_at_s = 0.0
        self._guest_behind_gate: int | None = None

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        """Take one look at `now` of the monotonic clock."""
        kv_blocks = self.kv.blocks(event.serving.state, event.serving_kv.state, event.guest.state, now)
        quota = self._quota(kv_blocks, self._gate_open(event.serving.state, now))
        if event.guest.state is not None and event.guest.state.allowed_tokens:
            self.seqs_allowed = event.guest.state.allowed_seqs
        actions: list[Write | Freeze] = []
        if quota != self.quota or now - self._written_at_s >= _RENEW_S:
            self.quota, self._written_at_s = quota, now
            actions.append(Write(quota))
        if self._disobeys(quota, event.guest.state, now):
            self.frozen = f"it went on computing {OBEY_S:g} s after its gate was shut"
            actions.append(Freeze(self.frozen))
        return actions

    @property
    def might_compute(self) -> bool:
        """Whether a guest that has work would get anything, by the last look."""
        return self.quota is not None and self.quota.gate_open and self.slack_s > 0

    def replaced(self) -> None:
        """The guest is being ended; what the next one does is its own."""
        self.frozen = ""
        self.shut_since_s = self._guest_behind_gate = None

    def _gate_open(self, serving: ServingState | None, now: float) -> bool:
        self.slack_s = slack_s(serving, self._policy.slo, now)
        if self.slack_s > 0:
            self.tight_since_s = None
        elif self.tight_since_s is None:
            self.tight_since_s = now
        return serving is not None and (self.tight_since_s is None or now - self.tight_since_s < PATIENCE_S)

    def _quota(self, kv_blocks: int, gate_open: bool) -> Quota:
        policy = self._policy
        return Quota(
            kv_blocks=kv_blocks,
            tokens_per_step=policy.tokens_max,
            active_seqs=policy.seqs_max,
            gate_open=gate_open and self.kv.presence is Presence.ACTIVE,
            ttft_s=policy.slo.ttft_s,
            tpot_s=policy.slo.tpot_s,
            interference=policy.interference,
            move_after_s=self._move_after_s,
        )

    def _disobeys(self, quota: Quota, guest: GuestState | None, now: float) -> bool:
        if quota.gate_open:
            self.shut_since_s = self._guest_behind_gate = None
            return False
        if self.shut_since_s is None:
            self.shut_since_s = now
        if guest is None or now - self.shut_since_s < OBEY_S:
            return False
        excused = guest.computed_steps + STEPS_UNDER_WAY
        # It can become less: the next guest begins at 0, while the board still tells of the last.
        if self._guest_behind_gate is None or excused < self._guest_behind_gate:
            self._guest_behind_gate = excused
        if guest.computed_steps <= self._guest_behind_gate:
            return False
        self._guest_behind_gate = guest.computed_steps
        return True
