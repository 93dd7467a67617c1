"""What the halves of a board say: the serving engine's state, the guest's quota, and the guest's answer. Pure.

Times `*_at_s` are seconds of the machine's monotonic clock, which all processes of a machine share; 0 is never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class ServingState:
    """The serving engine after its last step.

    `steps` counts them. `step_s` is how long the last step took that followed another without a pause, 0 before the
    first; `step_tokens` were computed in it, prompt tokens included. `oldest_waiting_at_s` is when the request that
    waits longest was first seen to wait, at most one step late; 0 while none waits. `busy_s` is how long it computed in
    all; a step after a pause, whose beginning nobody saw, counts as long as the one before.
    """

    steps: int
    running: int
    waiting: int
    oldest_waiting_at_s: float
    stepped_at_s: float
    step_s: float
    step_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Quota:
    """What the guest may use from its next step on: KV blocks, tokens per step, requests that run at once.

    With the gate shut nothing is computed, and running requests keep their blocks within `kv_blocks`.
    """

    kv_blocks: int
    tokens_per_step: int
    active_seqs: int
    gate_open: bool


@dataclass(frozen=True, slots=True)
class GuestState:
    """The guest's scheduler at its last step. An idle guest takes no steps, so its half of the board grows stale.

    `computed_steps` counts the finished ones of all `steps` that computed something. `quota_number` is the quota in
    force, 0 where it shut its gate by itself; `kv_blocks_total` is what it has without any quota. `step_s` and
    `step_tokens` are those of the last step that computed something, `busy_s` is the sum over all of them; on CPU the
    seconds are processor time, because waiting for the processor costs the serving engine nothing. `preemptions` counts
    requests that a shrinking quota set back. `starved_at_s` is when requests began to wait that no step can take
    although the gate is open, 0 while none do; `starvations` counts how often that began.
    """

    steps: int
    computed_steps: int
    quota_number: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    step_s: float
    step_tokens: int
    preemptions: int
    starved_at_s: float
    starvations: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Reading(Generic[S]):
    """One half as it was read. `state` is None where it must count as unknown, and `why` then says so in words.

    `number` counts the writes of a half, whoever made them.
    """

    state: S | None
    number: int = 0
    why: str = ""
