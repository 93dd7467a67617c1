"""Pairs of successive weight versions as training makes them, for the codec to show what it is worth on.

The shipped warm start learns FrozenLake for a few GRPO updates, sampled on its own model, without an engine. What is
compared are the weights as they are published: all parameters, rounded to bfloat16, as flat bits.
"""

from __future__ import annotations

import random
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import rose.demo.warmstart
from rose.demo.warmstart.sampler import play_episodes
from rose.env.chat import ChatRenderer
from rose.env.frozen_lake import FrozenLake
from rose.records import Group, Trajectory
from rose.trainer.grpo import GrpoSettings, update
from rose.trainer.optimizer import OptimizerSettings, WarmUpAdamW
from rose.trainer.policy import Policy, load_policy, load_tokenizer

MODEL = Path(rose.demo.warmstart.__file__).parent / "model"
GROUPS = 8
ATTEMPTS = 4
UPDATES = 6
MEASURED = 4
"""The last ones: by then Adam's first, denser steps are over."""

Bits = NDArray[np.uint16]


def training_bucket(learning_rate: float, epsilon: float, seed: int = 0) -> tuple[Bits, Bits]:
    """The versions before and after each of the measured updates, side by side as one bucket of 4 MB.

    The model is half a million parameters: alone, header and rows would weigh more than they do in a full bucket.
    """
    torch.manual_seed(seed)
    policy = load_policy(MODEL)
    renderer = ChatRenderer(load_tokenizer(MODEL))
    settings = OptimizerSettings(learning_rate=learning_rate, epsilon=epsilon, warm_up_updates=1)
    optimizer = WarmUpAdamW(policy.parameters(), settings)
    chance, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    versions = [published_bits(policy)]
    for version in range(UPDATES):
        tasks = [version * GROUPS + task for task in range(GROUPS) for _ in range(ATTEMPTS)]
        played = play_episodes(policy, renderer, FrozenLake, tasks, chance, version=version)
        update(policy, optimizer, _groups(played), GrpoSettings(), rng)
        versions.append(published_bits(policy))
    return np.concatenate(versions[-MEASURED - 1 : -1]), np.concatenate(versions[-MEASURED:])


def published_bits(policy: Policy) -> Bits:
    """All parameters as a flat array of bfloat16 bits, in the model's order."""
    flat = torch.cat([weight.reshape(-1) for weight in policy.weights().values()])
    bits: Bits = flat.to(torch.bfloat16).view(torch.uint16).numpy().copy()
    return bits


def _groups(played: list[Trajectory]) -> list[Group]:
    return [Group(name, tuple(members)) for name, members in groupby(played, key=lambda one: one.group_id)]
