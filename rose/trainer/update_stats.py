"""What an update looked like: sums over sampled tokens while it runs, statistics when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.records import Trajectory
from rose.trainer.advantage import Advantages
from rose.trainer.policy import TokenScores


@dataclass(slots=True)
class TokenSums:
    """Sums over `tokens` sampled tokens, and the largest ratio and log-prob difference among them."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    clipped: int = 0
    ratio_max: float = 0.0
    difference_max: float = 0.0

    @torch.no_grad()
    def observe(
        self, loss: Tensor, scores: TokenScores, sampled_logprob_N: Tensor, clip_low: float, clip_high: float
    ) -> None:
        """Count one micro-batch: `loss` is its sum."""
        difference_N = scores.logprob_N - sampled_logprob_N
        ratio_N = difference_N.exp()
        clipped_N = (ratio_N < 1.0 - clip_low) | (ratio_N > 1.0 + clip_high)
        self.add(
            TokenSums(
                tokens=len(difference_N),
                loss=float(loss),
                entropy=float(scores.entropy_N.sum()),
                kl=float((ratio_N - 1.0 - difference_N).sum()),
                clipped=int(clipped_N.sum()),
                ratio_max=float(ratio_N.max()),
                difference_max=float(difference_N.abs().max()),
            )
        )

    def add(self, other: TokenSums) -> None:
        self.tokens += other.tokens
        self.loss += other.loss
        self.entropy += other.entropy
        self.kl += other.kl
        self.clipped += other.clipped
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.difference_max = max(self.difference_max, other.difference_max)


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One update. Means are over the `tokens` trained; all are 0 if `optimizer_steps` is 0.

    `kl` estimates KL(sampling || policy) as mean(ratio - 1 - log ratio) (Schulman's k3, in nats). `clip_fraction`
    counts ratios outside the clip range. `logprob_mismatch_max` is the largest |trainer - engine| over the first
    minibatch, before any step: rounding to bfloat16 explains some hundredths, more is a broken engine.
    Every trajectory given to the update is in exactly one of `trained`, `zero_variance` and `left_out`.
    """

    optimizer_steps: int
    learning_rate: float
    tokens: int
    loss: float
    entropy: float
    kl: float
    clip_fraction: float
    ratio_max: float
    grad_norm: float
    logprob_mismatch_max: float
    trained: tuple[Trajectory, ...]
    zero_variance: tuple[Trajectory, ...]
    left_out: tuple[Trajectory, ...]

    @classmethod
    def of(
        cls,
        sums: TokenSums,
        advantages: Advantages,
        grad_norms: Sequence[float],
        mismatch_max: float,
        learning_rate: float,
    ) -> UpdateStats:
        tokens = max(1, sums.tokens)
        return cls(
            optimizer_steps=len(grad_norms),
            learning_rate=learning_rate,
            tokens=sums.tokens,
            loss=sums.loss / tokens,
            entropy=sums.entropy / tokens,
            kl=sums.kl / tokens,
            clip_fraction=sums.clipped / tokens,
            ratio_max=sums.ratio_max,
            grad_norm=sum(grad_norms) / max(1, len(grad_norms)),
            logprob_mismatch_max=mismatch_max,
            trained=tuple(trajectory for trajectory, _ in advantages.trained),
            zero_variance=advantages.zero_variance,
            left_out=advantages.left_out,
        )
