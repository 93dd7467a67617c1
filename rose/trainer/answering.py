"""What a version must answer: the trainer asks itself, with the very weights that it publishes.

Engines that were brought to the version elsewhere are asked the same before they are given any work (see
`rose_executor.guest_proof`). The trainer's forward pass shares nothing with theirs: no kernels, no layout, no cache.
"""

from __future__ import annotations

import torch

from rose.trainer.policy import Policy, rounded_bf16
from rose_transfer.distribution.known_answer import KnownAnswer

QUESTION_TOKENS, OUTPUT_TOKENS, LIKELY = 40, 8, 20
"""Longer than one block of 32 tokens, and long enough that most of the answer comes from keys and values."""
_STRIDE = 7919
"""A prime, so that ids are spread over the vocabulary and hardly repeat."""


def question(vocabulary: int, tokens: int) -> tuple[int, ...]:
    """Ids from the second to the fourth eighth of a vocabulary: special tokens stand at its ends."""
    first, count = vocabulary // 8, max(1, 3 * vocabulary // 8)
    return tuple(first + place * _STRIDE % count for place in range(tokens))


def known_answer(policy: Policy, asked: tuple[int, ...], tokens: int = OUTPUT_TOKENS) -> KnownAnswer:
    """The greedy continuation of a question by the policy as published, and what else was likely.

    The policy's own parameters are put aside meanwhile, and come back bit for bit.
    """
    exact = policy.weights()
    policy.load_weights(rounded_bf16(exact))
    try:
        return _continued(policy, asked, tokens)
    finally:
        policy.load_weights(exact)


@torch.no_grad()
def _continued(policy: Policy, asked: tuple[int, ...], tokens: int) -> KnownAnswer:
    output: list[int] = []
    likely: list[dict[int, float]] = []
    for _ in range(tokens):
        ids = torch.tensor([[*asked, *output]])
        logits_V = policy.logits_at(ids, torch.tensor([0]), torch.tensor([ids.shape[1] - 1]))[0].float()
        top = torch.log_softmax(logits_V, dim=-1).topk(min(LIKELY, logits_V.numel()))
        likely.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        output.append(int(top.indices[0]))
    return KnownAnswer(asked, tuple(output), tuple(likely))
