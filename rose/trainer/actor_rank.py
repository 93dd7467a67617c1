"""The actor: the policy that is trained, and its optimiser. Lives in a rank's process; see `rank`.

Invariants
- The same job, groups and order of calls give the same policy, bit for bit: seeds and threads are the job's.
- What leaves it are weights rounded to bfloat16, as they are published.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from rose.config import Job
from rose.records import Group
from rose.trainer.answering import OUTPUT_TOKENS, QUESTION_TOKENS, known_answer, question
from rose.trainer.grpo import GrpoSettings, update
from rose.trainer.optimizer import OptimizerSettings, WarmUpAdamW
from rose.trainer.policy import Weights, load_policy, rounded_bf16
from rose.trainer.update_stats import UpdateStats
from rose_transfer.distribution.known_answer import KnownAnswer


class ActorRank:
    """Raises ConfigError if the job's model folder cannot be loaded."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.train.threads)
        torch.manual_seed(job.run.seed)
        self._policy = load_policy(job.model.path)
        self._optimizer = WarmUpAdamW(
            self._policy.parameters(),
            OptimizerSettings(job.train.learning_rate, warm_up_updates=job.train.warmup_steps),
        )
        self._rng = random.Random(job.run.seed)
        tokens = min(QUESTION_TOKENS, job.engine.max_model_len - OUTPUT_TOKENS)
        self._question = question(self._policy.vocabulary, tokens)
        self._settings = GrpoSettings(
            minibatches=job.train.minibatches,
            micro_batch_tokens=job.train.micro_batch_tokens,
            clip_low=job.train.clip_low,
            clip_high=job.train.clip_high,
            max_grad_norm=job.train.max_grad_norm,
            temperature=job.rollout.temperature,
        )

    def update(self, groups: Sequence[Group]) -> UpdateStats:
        """One update on the groups. Raises TrainingError if a loss or gradient is not finite."""
        return update(self._policy, self._optimizer, groups, self._settings, self._rng)

    def weights(self) -> Weights:
        """All parameters, bfloat16."""
        return rounded_bf16(self._policy.weights())

    def answer(self) -> KnownAnswer:
        """What an engine with these weights must answer to a question that is the same for all versions."""
        return known_answer(self._policy, self._question)
