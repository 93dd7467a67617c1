"""What a guest may compute in its next step: its quota, and within that what serving's slack allows. Pure.

Invariants
- No quota that can be trusted: the gate is shut, and running requests keep the blocks that they have.
- Where an SLO comes with the quota, nothing is computed that the slack of this very look does not allow.
- A figure on the board that makes no sense harms nobody: it is brought within what the engine has (`quota.within`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rose.slo import Slo
from rose_executor.board_states import Given, Quota
from rose_executor.quota import computes, shut, within
from rose_executor.slack import Allowance, SlackAdmission, SlackPolicy
from rose_executor.step_profile import StepProfile
from rose_executor.step_sampling import StepSampling
from rose_executor.step_shape import StepShape


class Pending(NamedTuple):
    """What a guest has before it: `seqs` requests that the next step may serve, with so many tokens behind them.

    `under_way` are the steps that have begun and not ended.
    """

    seqs: int = 1
    context_tokens: int = 0
    under_way: Iterable[StepShape] = ()


_NOTHING_KNOWN = Pending()


@dataclass(frozen=True, slots=True)
class _NextStep:
    """What the next step would cost, by how many tokens it has."""

    profile: StepProfile
    pending: Pending

    def tokens_within(self, seconds: float, tokens_max: int) -> int:
        return self.profile.tokens_within(seconds, tokens_max, self.pending.seqs, self.pending.context_tokens)


class GuestAdmission:
    """One guest, with `limits` of its own. `quota` and `allowed` are in force since the last `look`.

    `open_s` is for how long more than nothing was allowed, `profile` what the guest's steps are seen to cost,
    `arrivals` how many requests had come to the serving engine by the last look that could see it.
    """

    def __init__(self, limits: Quota, now_s: float, profile: StepProfile | None = None) -> None:
        self.limits = limits
        self.quota = shut(limits)
        self.quota_number = self.arrivals = 0
        self.allowed = Allowance(0, 0)
        self.open_s = 0.0
        self.profile = StepProfile() if profile is None else profile
        self._slack = SlackAdmission()
        self._sampling = StepSampling()
        self._given: Quota | None = None
        self._policy: SlackPolicy | None = None
        self._looked_at_s = now_s

    @property
    def slack_s(self) -> float:
        """What serving could still lose when it was asked last."""
        return self._slack.slack_s

    @property
    def open(self) -> bool:
        """Whether the next step may compute anything."""
        return self.allowed.tokens_per_step > 0

    @property
    def seqs_kept(self) -> int:
        """How many requests may go on running. While nothing is computed those that run stay: a context costs more."""
        return self.allowed.active_seqs if self.open else self.quota.active_seqs

    def look(self, given: Given, now_s: float, pending: Pending = _NOTHING_KNOWN) -> None:
        """Take what the board says."""
        if self.open:
            self.open_s += now_s - self._looked_at_s
        self._looked_at_s = now_s
        self.quota_number = given.quota_number
        if given.serving is not None:
            self.arrivals = given.serving.arrivals
        if given.quota is None or given.quota != self._given:
            self._take(given.quota)
        self.allowed = self._allow(given, now_s, pending)

    def computed(self, shape: StepShape, seconds: float, now_s: float) -> None:
        """A step has ended, at `now_s` of the clock of `look`."""
        if self._sampling.takes(self.profile.steps, seconds):
            self.profile.saw(shape, seconds, now_s)
        self._slack.computed(seconds)

    def _take(self, quota: Quota | None) -> None:
        """Another quota, or none; most looks find the one that is in force, and nothing of this is done."""
        self._given = quota
        self.quota = shut(self.quota) if quota is None else within(quota, self.limits)
        self._policy = None
        if self.quota.ttft_s and self.quota.tpot_s:
            slo = Slo(self.quota.ttft_s, self.quota.tpot_s)
            seqs, tokens = self.quota.active_seqs, self.quota.tokens_per_step
            self._policy = SlackPolicy(slo, tokens, seqs, self.quota.interference)

    def _allow(self, given: Given, now_s: float, pending: Pending) -> Allowance:
        quota = self.quota
        if not computes(quota):
            return Allowance(0, 0)
        if self._policy is None:
            return Allowance(quota.tokens_per_step, quota.active_seqs)
        under_way_s = sum(self.profile.seconds(shape) for shape in pending.under_way)
        cost = _NextStep(self.profile, pending)
        return self._slack.allow(given.serving, self._policy, cost, now_s, under_way_s=under_way_s)
