"""Slack admission: how much of its next step a guest may compute without the serving engine missing its SLO. Pure.

*Slack* is the time by which the serving engine could be late now and still be on time: with the next token of each
request that has begun to answer, and with the first token of each that has not. The guest asks at the top of each of
its steps, and its step may cost `SPEND` of that, no more.

    serving                     slack in seconds (the least of those that apply)
    unknown                     none
    idle                        `SURPRISE` of ttft_s: a request that arrives during a guest's step may lose that to it
    requests are decoding       tpot_s, less the next step, less what the guest has computed since the last one
                                or, where that is longer, less the time since the last one
    requests are unanswered     ttft_s, less the longest wait so far and what a first token takes
    looked at from outside      besides, at work or idle: tpot_s, less the next step, less what the guest has computed
                                since the look. So whatever comes in unseen between two looks, all that the guest
                                computes meanwhile is less than one token may be late by

Source: arXiv 2605.06534 (ROSE), slack per request and tick, S = (t_last + B) - now - T. All requests that decode get
a token in each step, so that the last step's end is the t_last of them all; of the others the oldest has the least.

Invariants
- Nothing is given that costs more than the slack of that very moment, by what the guest's steps are seen to cost.
- What a guest has computed beside a serving step counts against that step, in however many steps of its own. Where
  steps are not seen, it counts against the look.
- A guest that gets nothing teaches nothing: beside an idle engine it may try a few tokens for a moment in each second,
  or one slow step would shut it out for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rose.errors import ConfigError
from rose.slo import Slo
from rose_executor.board_states import ServingState
from rose_executor.step_profile import FIRST_TOKENS

SPEND = 0.5
"""Of the slack that is there: what is expected of a step may be wrong by as much again."""
SURPRISE = 0.5
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

    def __post_init__(self) -> None:
        if not 0 < self.interference <= 1 or self.tokens_max < 0 or self.seqs_max < 0:
            raise ConfigError(f"no policy to admit by: {self}", expected="0 < interference <= 1, and no bound below 0")


class StepCost(Protocol):
    """What is asked about the guest's steps; `step_profile.StepProfile` learns it."""

    def tokens_within(self, seconds: float, tokens_max: int) -> int: ...


class Allowance(NamedTuple):
    """What the guest may compute per step now: nothing where `tokens_per_step` is 0.

    `active_seqs` follows the most that it was allowed in the last seconds: a request set back costs its whole context,
    one that merely waits for its turn costs nothing.
    """

    tokens_per_step: int
    active_seqs: int


def slack_s(
    serving: ServingState | None, slo: Slo, now_s: float, *, computed_s: float = 0.0, interference: float = 1.0
) -> float:
    """See the table above; never negative. `computed_s` is what the guest computed since the last step, or look."""
    if serving is None:
        return 0.0
    slack = SURPRISE * slo.ttft_s if serving.idle else math.inf
    if serving.decoding or serving.looked_at_s:
        needed_s = serving.next_step_s + interference * computed_s
        if not serving.looked_at_s:
            needed_s = max(needed_s, now_s - serving.stepped_at_s)
        slack = min(slack, slo.tpot_s - needed_s)
    if serving.unanswered:
        waited_s = now_s - serving.oldest_unanswered_at_s
        slack = min(slack, slo.ttft_s - waited_s - serving.first_token_s)
    return max(0.0, slack) if slack < math.inf else SURPRISE * slo.ttft_s


class SlackAdmission:
    """One guest beside one serving engine. `slack_s` is what the last allowance was made from."""

    def __init__(self) -> None:
        self.slack_s = 0.0
        self._beside: tuple[int, float] | None = None
        self._computed_s = 0.0
        self._peak = 0
        self._peak_at_s = 0.0
        self._denied_since_s: float | None = None

    def computed(self, seconds: float) -> None:
        """A step of the guest has ended, and did cost so much."""
        self._computed_s += seconds

    def allow(
        self,
        serving: ServingState | None,
        policy: SlackPolicy,
        cost: StepCost,
        now_s: float,
        *,
        under_way_s: float = 0.0,
    ) -> Allowance:
        """What the next step may compute; `serving` is None where its state is unknown.

        `under_way_s` is what steps that have begun and not ended are expected to cost.
        """
        if serving is not None and (beside := (serving.steps, serving.looked_at_s)) != self._beside:
            self._beside, self._computed_s = beside, 0.0
        computed_s = self._computed_s + under_way_s
        self.slack_s = slack_s(serving, policy.slo, now_s, computed_s=computed_s, interference=policy.interference)
        fits = cost.tokens_within(SPEND * self.slack_s / policy.interference, policy.tokens_max)
        if self._tries(serving, fits, now_s):
            fits = min(FIRST_TOKENS, policy.tokens_max)
        return Allowance(fits, self._seqs(fits, policy.seqs_max, now_s))

    def _tries(self, serving: ServingState | None, fits: int, now_s: float) -> bool:
        """Whether a guest for which nothing fits may find out if that is still so."""
        if fits or serving is None or not serving.idle:
            self._denied_since_s = None
            return False
        if self._denied_since_s is None or now_s - self._denied_since_s >= _TRIAL_EVERY_S + _TRIAL_S:
            self._denied_since_s = now_s
        return now_s - self._denied_since_s >= _TRIAL_EVERY_S

    def _seqs(self, tokens: int, seqs_max: int, now_s: float) -> int:
        if tokens >= self._peak or now_s - self._peak_at_s > _SEQS_WINDOW_S:
            # Late and half at a time: a burst of serving is no reason to set everything back, for that costs contexts.
            self._peak = max(tokens, self._peak // 2, 1)
            self._peak_at_s = now_s
        return min(self._peak, seqs_max)
