"""What the halves of a board say: the serving engine's state and memory, the guest's quota and its answer. Pure.

Times `*_at_s` are seconds of the machine's monotonic clock, which all processes of a machine share; 0 is never.

They are tuples because both engines make some in each of their steps: nothing else that cannot change is made as fast.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")


class ServingState(NamedTuple):
    """The serving engine now: after its last step, and with every request that has arrived since.

    `steps` counts its steps, `arrivals` the requests that were seen to come. `running` and `waiting` are the engine's
    own counts after the last step. Of all requests `decoding` have their first token and are owed the next;
    `unanswered` are owed their first, and `oldest_unanswered_at_s` is when the first of these came, 0 if there is none.

    `step_s` is how long the last step took that followed another without a pause, 0 before the first; `step_tokens`
    were computed in it, prompt tokens included. `next_step_s` is what the next step is expected to take,
    `first_token_s` what a request needs of the engine for its first token once it is its turn. `busy_s` is how long it
    computed in all; a step after a pause, whose beginning nobody saw, counts as long as the one before.

    `looked_at_s` is 0 where the engine itself tells of each step. Otherwise somebody looked at it from outside then,
    and whatever it has done since is unseen.
    """

    steps: int = 0
    arrivals: int = 0
    running: int = 0
    waiting: int = 0
    decoding: int = 0
    unanswered: int = 0
    oldest_unanswered_at_s: float = 0.0
    stepped_at_s: float = 0.0
    step_s: float = 0.0
    step_tokens: int = 0
    next_step_s: float = 0.0
    first_token_s: float = 0.0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    busy_s: float = 0.0
    looked_at_s: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether it owes nobody anything."""
        return not (self.running or self.waiting or self.decoding or self.unanswered)


class ServingKv(NamedTuple):
    """What a serving engine that gives memory back holds of its cache: bytes in all, resident, kept beyond its use."""

    total_bytes: int = 0
    resident_bytes: int = 0
    spare_bytes: int = 0


class Quota(NamedTuple):
    """What the guest may use from its next step on: KV blocks, tokens per step, requests that run at once.

    With the gate shut nothing is computed, and running requests keep their blocks within `kv_blocks`. Within the quota
    the guest computes what the serving engine's slack allows: `ttft_s` and `tpot_s` are what that owes its users,
    `interference` is by which part of a guest step's cost a serving step beside it becomes longer. Without an SLO (0)
    nobody asks for slack. A request that the quota keeps from computing for `move_after_s` is given back to whoever
    sent it, with its tokens; with 0 it waits.
    """

    kv_blocks: int
    tokens_per_step: int
    active_seqs: int
    gate_open: bool
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    interference: float = 1.0
    move_after_s: float = 0.0


class GuestState(NamedTuple):
    """The guest's scheduler at its last step. An idle guest takes no steps, so its half of the board grows stale.

    `computed_steps` counts the finished ones of all `steps` that computed something. `quota_number` is the quota in
    force, 0 where it shut its gate by itself; `kv_blocks_total` is what it has without any quota, and behind
    `kv_blocks_resident` of these there is memory. `kv_gives_back` is whether memory behind blocks that nobody uses goes
    back; where it does not, all of them are resident. `step_s` is what the last step cost that computed something,
    `step_tokens`, `step_seqs` and `step_context_tokens` what it had to do (see `step_shape`), `busy_s` is the sum over
    all of them; on CPU the seconds are processor time, because waiting for the processor costs the serving engine
    nothing.

    `slack_s` is what serving could still lose when the last step was planned, `allowed_tokens` what that step might
    compute at most, `allowed_seqs` how many requests may run; `open_s` is for how long more than nothing was allowed.
    `preemptions` counts requests that a shrinking quota set back, `moved` those that were given back with their tokens.
    `starved_at_s` is when requests began to wait that no step can take although the gate is open, 0 while none do;
    `starvations` counts how often that began.

    `profile_steps` counts the steps that its profile has ever learnt from, `step_margin` is what every estimate of that
    is multiplied by. `drifted_at_s` is since when steps cost another amount than expected, 0 while they do not, and
    `drift_factor` is what one in ten of them exceeds that by (see `step_drift`).
    """

    steps: int = 0
    computed_steps: int = 0
    quota_number: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_resident: int = 0
    kv_gives_back: bool = False
    step_s: float = 0.0
    step_tokens: int = 0
    step_seqs: int = 0
    step_context_tokens: int = 0
    busy_s: float = 0.0
    slack_s: float = 0.0
    allowed_tokens: int = 0
    allowed_seqs: int = 0
    open_s: float = 0.0
    preemptions: int = 0
    moved: int = 0
    starved_at_s: float = 0.0
    starvations: int = 0
    profile_steps: int = 0
    step_margin: float = 1.0
    drifted_at_s: float = 0.0
    drift_factor: float = 0.0


class Reading(NamedTuple, Generic[S]):
    """One half as it was read. `state` is None where it must count as unknown, and `why` then says so in words.

    `number` counts the writes of a half, whoever made them.
    """

    state: S | None
    number: int = 0
    why: str = ""


class Given(NamedTuple):
    """What a guest reads in one look: its quota, with its number (0 if there is none), and the serving engine."""

    quota: Quota | None
    quota_number: int
    serving: ServingState | None
