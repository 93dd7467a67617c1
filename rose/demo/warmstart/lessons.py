"""Transcripts to weighted token rows, and the supervised training on them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from rose.demo.warmstart.transcripts import Transcript
from rose.env.chat import ChatRenderer
from rose.trainer.policy import Policy

OBSERVATION_WEIGHT = 0.2
"""Weight of an observation's token in the loss: predicting them teaches what moves and holes do."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One transcript as tokens; `answered[i]` says that the policy is to produce token i itself."""

    token_ids: tuple[int, ...]
    answered: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """One supervised phase. Rates follow a linear warm-up and a cosine down to a tenth.

    With `muon_rate`, matrices other than the embedding are trained by Muon at that rate and all else by
    AdamW at `adam_rate`; without it everything is AdamW's.
    """

    name: str
    adam_rate: float
    warm_up_steps: int
    muon_rate: float | None = None

    def rate_factor(self, step: int, steps: int) -> float:
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / self.warm_up_steps) * decay


FEATURES = Phase("features", adam_rate=3e-3, warm_up_steps=20, muon_rate=5e-3)
FORMAT = Phase("format", adam_rate=5e-4, warm_up_steps=5)


def to_lesson(transcript: Transcript, renderer: ChatRenderer) -> Lesson:
    """Tokens exactly as a rollout would see them, up to and including the last observation."""
    conversation, delta = renderer.open(transcript.system_prompt, transcript.observations[0])
    token_ids = list(delta.ids)
    answered = [False] * len(delta.ids)
    for answer, observation in zip(transcript.answers, transcript.observations[1:], strict=True):
        output_ids = (*renderer.encode(answer), renderer.end_of_turn_id)
        conversation.answer(output_ids)
        delta = conversation.observe(observation)
        token_ids.extend((*output_ids, *delta.ids))
        answered.extend([True] * len(output_ids) + [False] * len(delta.ids))
    return Lesson(tuple(token_ids), tuple(answered))


def teach(policy: Policy, phase: Phase, lessons: Sequence[Lesson], rows: int, draw: random.Random) -> list[float]:
    """One pass over the lessons, `rows` of them per step; the loss of every step."""
    batches = _by_length(lessons, rows)
    draw.shuffle(batches)
    optimizers = _optimizers(policy, phase)
    base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    losses: list[float] = []
    for step, batch in enumerate(batches):
        factor = phase.rate_factor(step, len(batches))
        for optimizer, rates in zip(optimizers, base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
        loss = _loss(policy, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _by_length(lessons: Sequence[Lesson], rows: int) -> list[list[Lesson]]:
    # Equally long rows share a batch: padding would cost as much as tokens do.
    ordered = sorted(lessons, key=lambda lesson: len(lesson.token_ids))
    return [ordered[start : start + rows] for start in range(0, len(ordered), rows)]


def _optimizers(policy: Policy, phase: Phase) -> list[torch.optim.Optimizer]:
    named = list(policy.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name] if phase.muon_rate else []
    taken = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in taken]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=phase.adam_rate, betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if phase.muon_rate:
        optimizers.append(
            torch.optim.Muon(matrices, lr=phase.muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def _loss(policy: Policy, lessons: Sequence[Lesson]) -> Tensor:
    """Weighted mean cross-entropy over all tokens but the first of each row."""
    width = max(len(lesson.token_ids) for lesson in lessons) - 1
    ids_BT = torch.zeros((len(lessons), width), dtype=torch.int64)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    for row, lesson in enumerate(lessons):
        count = len(lesson.token_ids) - 1
        ids_BT[row, :count] = torch.tensor(lesson.token_ids[:-1])
        rows.extend([row] * count)
        columns.extend(range(count))
        targets.extend(lesson.token_ids[1:])
        weights.extend(1.0 if answered else OBSERVATION_WEIGHT for answered in lesson.answered[1:])
    logits_NV = policy.logits_at(ids_BT, torch.tensor(rows), torch.tensor(columns))
    weight_N = torch.tensor(weights)
    loss_N = cross_entropy(logits_NV, torch.tensor(targets), reduction="none")
    return (loss_N * weight_N).sum() / weight_N.sum()
