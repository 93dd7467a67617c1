"""Slack admission: how much of its next step a guest may compute without the serving engine missing its SLO. Pure.

*Slack* is the time by which the serving engine could be late now and still be on time: with each token of a running
request, and with the first token of one that waits. A guest's step beside it may take that long, no longer.

    serving                       slack in seconds
    unknown                       none
    idle                          `surprise` of ttft_s: what a request that arrives during a guest's step may lose to it
    requests run                  tpot_s less a serving step, or less the time since the last one where that is longer
    requests wait                 also: ttft_s less the longest wait and a serving step

Invariants
- Less slack takes effect at once. More does only after `regrow_s` in which it was there all the time, and then at
  most doubles what the guest has: a slack that swings leaves the guest at its lower end instead of flapping.
- What a step of the guest costs is asked of a profile that learns; nothing here knows an engine's speed. A guest that
  gets nothing teaches nothing: beside an idle engine it may try a few tokens for a moment in each second, or one slow
  step would shut it out for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from rose.errors import ConfigError
from rose.slo import Slo
from rose_executor.board_states import ServingState

_FIRST_TOKENS = 8
"""The least that a guest begins with again after it had nothing."""
_SEQS_WINDOW_S = 10.0
_TRIAL_EVERY_S = 1.0
_TRIAL_S = 0.1


@dataclass(frozen=True, slots=True)
class SlackPolicy:
    """How the slack is shared out.

    `interference` is the part of a guest step's cost that a serving step beside it becomes longer by: 1 where they
    take turns on one device, less where a partitioner keeps them apart (`Partitioner.describe`). `tokens_max` and
    `seqs_max` bound what a guest ever gets.
    """

    slo: Slo
    tokens_max: int
    seqs_max: int
    interference: float = 1.0
    surprise: float = 0.25
    regrow_s: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.interference <= 1 or self.tokens_max < 1 or self.seqs_max < 1:
            raise ConfigError(f"no policy to admit by: {self}", expected="0 < interference <= 1, and room for a guest")


class StepCost(Protocol):
    """What is asked about the guest's steps; `step_profile.StepProfile` learns it."""

    def tokens_within(self, seconds: float, tokens_max: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the guest may compute per step now: nothing where `tokens_per_step` is 0.

    `active_seqs` follows the most that it was allowed in the last seconds: a request set back costs its whole context,
    one that merely waits for its turn costs nothing.
    """

    tokens_per_step: int
    active_seqs: int


def slack_s(serving: ServingState | None, policy: SlackPolicy, now_s: float) -> float:
    """See the table above; never negative."""
    if serving is None:
        return 0.0
    if not serving.running and not serving.waiting:
        return policy.surprise * policy.slo.ttft_s
    slack = math.inf
    if serving.running:
        slack = policy.slo.tpot_s - max(serving.step_s, now_s - serving.stepped_at_s)
    if serving.waiting:
        waited_s = now_s - serving.oldest_waiting_at_s
        slack = min(slack, policy.slo.ttft_s - waited_s - serving.step_s)
    return max(0.0, slack)


class SlackAdmission:
    """One guest beside one serving engine. `slack_s` is what the last allowance was made from."""

    def __init__(self, policy: SlackPolicy) -> None:
        self.slack_s = 0.0
        self._policy = policy
        self._tokens = 0
        self._more_since_s: float | None = None
        self._more = 0
        self._peak = 0
        self._peak_at_s = 0.0
        self._denied_since_s: float | None = None

    def allow(self, serving: ServingState | None, cost: StepCost, now_s: float) -> Allowance:
        """What the guest may compute from now on; `serving` is None where its state is unknown."""
        self.slack_s = slack_s(serving, self._policy, now_s)
        fits = cost.tokens_within(self.slack_s / self._policy.interference, self._policy.tokens_max)
        self._tokens = self._without_flapping(fits, now_s)
        if self._tries(serving, fits, now_s):
            self._tokens = min(_FIRST_TOKENS, self._policy.tokens_max)
        return Allowance(self._tokens, self._seqs(now_s))

    def _tries(self, serving: ServingState | None, fits: int, now_s: float) -> bool:
        """Whether a guest for which nothing fits may find out if that is still so."""
        if fits or serving is None or serving.running or serving.waiting:
            self._denied_since_s = None
            return False
        if self._denied_since_s is None or now_s - self._denied_since_s >= _TRIAL_EVERY_S + _TRIAL_S:
            self._denied_since_s = now_s
        return now_s - self._denied_since_s >= _TRIAL_EVERY_S

    def _without_flapping(self, fits: int, now_s: float) -> int:
        if fits <= self._tokens:
            self._more_since_s = None
            return fits
        if self._more_since_s is None:
            self._more_since_s, self._more = now_s, fits
        self._more = min(self._more, fits)
        if now_s - self._more_since_s < self._policy.regrow_s:
            return self._tokens
        self._more_since_s = None
        return min(self._more, max(2 * self._tokens, _FIRST_TOKENS))

    def _seqs(self, now_s: float) -> int:
        if self._tokens >= self._peak or now_s - self._peak_at_s > _SEQS_WINDOW_S:
            # Late and half at a time: a burst of serving is no reason to set everything back, for that costs contexts.
            self._peak = max(self._tokens, self._peak // 2, 1)
            self._peak_at_s = now_s
        return min(self._peak, self._policy.seqs_max)
