"""One GRPO update: groups of trajectories in, a changed policy and its statistics out.

Invariants
- The loss is the mean over all sampled tokens of a minibatch. Micro-batches only bound memory: their gradients
  are summed and divided once by the minibatch's token count, so the result is that of one big batch.
- Ratios are against the log-probs that the tokens were *sampled* with, as the engine reported them.
- No optimiser step is taken on a loss or gradient that is not finite.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rose.errors import TrainingError
from rose.records import Group, Segment, Trajectory
from rose.trainer.advantage import group_advantages
from rose.trainer.batch import Batch, micro_batches, pad
from rose.trainer.optimizer import WarmUpAdamW
from rose.trainer.policy import Policy, TokenScores
from rose.trainer.update_stats import TokenSums, UpdateStats

_MIN_TRAJECTORIES = 4
"""Per minibatch; a noisier gradient is not worth a step of its own."""


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """How to update; the defaults are what learns FrozenLake in minutes.

    `micro_batch_tokens` caps the padded input tokens of one forward pass. `temperature` is the one that the
    tokens were sampled with. The clip range is the asymmetric one of DAPO (Yu et al. 2025, section 3.1).
    """

    minibatches: int = 2
    micro_batch_tokens: int = 4096
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class _Row:
    segment: Segment
    advantage: float


def update(
    policy: Policy, optimizer: WarmUpAdamW, groups: Sequence[Group], settings: GrpoSettings, rng: random.Random
) -> UpdateStats:
    """Train the policy on the groups, in place. `rng` decides how trajectories are dealt to minibatches.

    Without any group that has a variance of rewards, nothing is trained and the statistics say so.
    Raises TrainingError if a loss or gradient is not finite; that minibatch's step is not taken.
    """
    advantages = group_advantages(groups)
    dealt = list(advantages.trained)
    rng.shuffle(dealt)
    count = min(settings.minibatches, max(1, len(dealt) // _MIN_TRAJECTORIES)) if dealt else 0
    optimizer.begin_update()
    sums = TokenSums()
    grad_norms: list[float] = []
    mismatch_max = 0.0
    for index in range(count):
        minibatch = TokenSums()
        grad_norms.append(_step(policy, optimizer, _rows(dealt[index::count]), settings, minibatch))
        sums.add(minibatch)
        if index == 0:
            mismatch_max = minibatch.difference_max
    return UpdateStats.of(sums, advantages, grad_norms, mismatch_max, optimizer.rate)


def _rows(dealt: Sequence[tuple[Trajectory, float]]) -> list[_Row]:
    return [
        _Row(segment, advantage)
        for trajectory, advantage in dealt
        for segment in trajectory.segments()
        if segment.output_tokens
    ]


def _step(
    policy: Policy, optimizer: WarmUpAdamW, rows: Sequence[_Row], settings: GrpoSettings, sums: TokenSums
) -> float:
    """One optimiser step on a minibatch; the gradient's norm before clipping."""
    optimizer.zero_grad()
    accumulate_gradients(policy, [row.segment for row in rows], [row.advantage for row in rows], settings, sums)
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    for gradient in gradients:
        gradient.div_(sums.tokens)
    norm = get_total_norm(gradients)
    if not torch.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {float(norm)}", to_do="lower the learning rate")
    clip_grads_with_norm_(policy.parameters(), settings.max_grad_norm, norm)
    optimizer.step()
    return float(norm)


def accumulate_gradients(
    policy: Policy, segments: Sequence[Segment], advantages: Sequence[float], settings: GrpoSettings, sums: TokenSums
) -> None:
    """Add the gradients of the loss *summed* over sampled tokens, micro-batch by micro-batch, and fill `sums`.

    Raises TrainingError if the loss is not finite.
    """
    for indices in micro_batches(segments, settings.micro_batch_tokens):
        batch = pad([segments[index] for index in indices])
        advantage_B = torch.tensor([advantages[index] for index in indices], dtype=torch.float32)
        scores = policy.score(batch, settings.temperature)
        loss_N = token_losses(scores, batch.sampled_logprob_N, advantage_B[batch.row_N], settings)
        loss = loss_N.sum()
        if not torch.isfinite(loss):
            raise _broken(loss, scores, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.observe(loss, scores, batch.sampled_logprob_N, settings.clip_low, settings.clip_high)


def _broken(loss: Tensor, scores: TokenScores, batch: Batch) -> TrainingError:
    if not torch.isfinite(scores.logprob_N).all():
        whose, to_do = (
            "the policy's log-probs are not finite",
            "go on from an earlier version, more slowly",
        )
    elif not torch.isfinite(batch.sampled_logprob_N).all():
        whose, to_do = "the engine's log-probs are not finite", "look at the engine's log, and restart it"
    else:
        whose, to_do = "policy and engine are too far apart", "look at the parity of the last versions in the report"
    return TrainingError(f"the loss is {float(loss.detach())}: {whose}", expected="a finite loss", to_do=to_do)


def token_losses(scores: TokenScores, sampled_logprob_N: Tensor, advantage_N: Tensor, settings: GrpoSettings) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) per token, the clipped objective of PPO.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7.
    """
    ratio_N = (scores.logprob_N - sampled_logprob_N).exp()
    clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
