"""A policy small enough for unit tests, and trajectories for it. Not a test module."""

from __future__ import annotations

import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose.records import Finish, Group, Outcome, Purpose, Trajectory, Turn, VersionSpan
from rose.trainer.policy import Policy

VOCABULARY = 32


def tiny_policy(seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return Policy(Qwen3ForCausalLM(config))


def a_turn(draw: random.Random, *, starts_segment: bool = False, logprob: float | None = None) -> Turn:
    context = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9)))
    outputs = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5)))
    logprobs = tuple(draw.uniform(-4, -1) if logprob is None else logprob for _ in outputs)
    span = VersionSpan(1, 0, len(outputs))
    return Turn(context, outputs, logprobs, (span,), Finish.STOP, starts_segment=starts_segment)


def a_trajectory(
    draw: random.Random,
    reward: float,
    *,
    outcome: Outcome = Outcome.COMPLETED,
    turns: tuple[Turn, ...] | None = None,
    name: str = "t",
) -> Trajectory:
    if turns is None:
        turns = tuple(a_turn(draw) for _ in range(draw.randint(1, 4)))
    return Trajectory(name, "g", 1, Purpose.TRAIN, turns, reward, reward > 0, outcome)


def a_group(draw: random.Random, rewards: list[float], name: str = "g") -> Group:
    members = tuple(a_trajectory(draw, reward, name=f"{name}-{index}") for index, reward in enumerate(rewards))
    return Group(name, members)
