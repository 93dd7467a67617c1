"""What the executor does about its guest, each time it has looked at the board. Pure.

Invariants
- The quota is written whenever it changes, and at least every `HEARTBEAT_S` of the board: without that the guest shuts
  its own gate. So whatever ends the executor, nothing is left unthrottled.
- Serving unknown, or no slack: the gate is shut.
- The board is looked at every `LOOK_S` while a guest with work may compute. Without work it takes no steps, and its
  first one may begin with a quota that is older by `IDLE_LOOK_S`; with the gate shut nothing but its opening is late.
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

from rose_executor.board_states import GuestState, Quota, Reading, ServingState
from rose_executor.slack import SlackAdmission, SlackPolicy
from rose_executor.step_profile import StepProfile
from rose_executor.step_shape import StepShape

OBEY_S = 1.0
"""A guest's longest step, by far, and the time until it takes the next quota."""
STEPS_UNDER_WAY = 2
"""At most so many steps of an engine are under way at once: with asynchronous scheduling, one behind another."""
LOOK_S = 0.005
IDLE_LOOK_S = 0.02
_RENEW_S = 0.035
_TRUSTED_S = 0.5
"""A guest shuts its gate when its quota is older than that: `QUOTA.stale_after_s` of the board."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What both engines' halves of the board said just now."""

    serving: Reading[ServingState]
    guest: Reading[GuestState]


@dataclass(frozen=True, slots=True)
class Write:
    """Put this quota on the board."""

    quota: Quota


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop every process of the guest; `why` in words."""

    why: str


class GuestRules:
    """One guest. `kv_blocks` is its share of memory, fixed for now; `frozen` says why it was frozen, "" if not.

    `quota` is the last one written, None before the first; `shut_since_s` is since when its gate is shut, None while it
    is open; `open_s` is for how long it was open in all. `look_again_s` is after how long the next look is due.
    """

    def __init__(self, policy: SlackPolicy, kv_blocks: int) -> None:
        self.profile = StepProfile()
        self.admission = SlackAdmission(policy)
        self.frozen = ""
        self.quota: Quota | None = None
        self.shut_since_s: float | None = None
        self.open_s = 0.0
        self.look_again_s = LOOK_S
        self._kv_blocks = kv_blocks
        self._looked_at_s = 0.0
        self._written_at_s = 0.0
        self._guest_steps = 0
        self._guest_behind_gate: int | None = None

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        """Take one look at `now` of the monotonic clock."""
        if self.quota is not None and self.quota.gate_open:
            self.open_s += min(now - self._looked_at_s, _TRUSTED_S)
        self._looked_at_s = now
        guest = event.guest.state
        if guest is not None and guest.computed_steps != self._guest_steps:
            self._guest_steps = guest.computed_steps
            self.profile.saw(StepShape(guest.step_tokens), guest.step_s, now)
        allowance = self.admission.allow(event.serving.state, self.profile, now)
        quota = Quota(
            kv_blocks=self._kv_blocks,
            tokens_per_step=allowance.tokens_per_step,
            active_seqs=allowance.active_seqs,
            gate_open=allowance.tokens_per_step > 0,
        )
        computes = quota.gate_open and guest is not None and (guest.running > 0 or guest.waiting > 0)
        self.look_again_s = LOOK_S if computes else IDLE_LOOK_S
        actions: list[Write | Freeze] = []
        if quota != self.quota or now - self._written_at_s >= _RENEW_S:
            self.quota, self._written_at_s = quota, now
            actions.append(Write(quota))
        if self._disobeys(quota, guest, now):
            self.frozen = f"it went on computing {OBEY_S:g} s after its gate was shut"
            actions.append(Freeze(self.frozen))
        return actions

    def replaced(self) -> None:
        """The guest is being ended; what the next one does is its own."""
        self.frozen = ""
        self.shut_since_s = self._guest_behind_gate = None

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
