"""The reference: the policy that training began with, never changed. Lives in a rank's process; see `rank`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rose.config import Job
from rose.records import Trajectory
from rose.trainer.batch import micro_batches, pad
from rose.trainer.policy import load_policy


class ReferenceRank:
    """Raises ConfigError if the job's model folder cannot be loaded."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.train.threads)
        self._policy = load_policy(job.model.path)
        self._micro_batch_tokens = job.train.micro_batch_tokens
        self._temperature = job.rollout.temperature

    @torch.no_grad()
    def divergence(self, trajectories: Sequence[Trajectory]) -> float:
        """How far what sampled these has moved from here: KL(sampling || reference) in nats per sampled token.

        Estimated by mean(ratio - 1 - log ratio) with ratio = reference / sampling, Schulman's k3, which is never
        negative; 0 if nothing was sampled.
        """
        segments = [
            segment for trajectory in trajectories for segment in trajectory.segments() if segment.output_tokens
        ]
        total, tokens = 0.0, 0
        for indices in micro_batches(segments, self._micro_batch_tokens):
            batch = pad([segments[index] for index in indices])
            difference_N = self._policy.score(batch, self._temperature).logprob_N - batch.sampled_logprob_N
            total += float((difference_N.exp() - 1.0 - difference_N).sum())
            tokens += len(difference_N)
        return total / max(1, tokens)
