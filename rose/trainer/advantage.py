"""Group-relative advantages, and which trajectories may be trained at all. Pure.

Invariants
- Every trajectory of the given groups lands in exactly one of the three lists of `Advantages`.
- Only completed trajectories with sampled tokens are trained or count for their group's baseline: a failed
  environment says nothing about the policy.
- A group whose rewards are all equal teaches nothing and is set aside whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rose.records import Group, Outcome, Trajectory

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that almost equal rewards do not blow up."""

_EQUAL_WITHIN = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """`trained` with one advantage each, `zero_variance`, and `left_out` (not completed, or nothing sampled)."""

    trained: tuple[tuple[Trajectory, float], ...]
    zero_variance: tuple[Trajectory, ...]
    left_out: tuple[Trajectory, ...]


def group_advantages(groups: Sequence[Group]) -> Advantages:
    """(reward - mean) / (std + 1e-4) within each group, std over n - 1.

    GRPO: Shao et al. 2024, "DeepSeekMath", section 4.1, equation for outcome supervision.
    """
    trained: list[tuple[Trajectory, float]] = []
    zero_variance: list[Trajectory] = []
    left_out: list[Trajectory] = []
    for group in groups:
        usable = [trajectory for trajectory in group.trajectories if _usable(trajectory)]
        left_out.extend(trajectory for trajectory in group.trajectories if not _usable(trajectory))
        rewards = [trajectory.reward for trajectory in usable]
        if not rewards or max(rewards) - min(rewards) < _EQUAL_WITHIN:
            zero_variance.extend(usable)
            continue
        mean, scale = fmean(rewards), stdev(rewards) + STD_FLOOR
        trained.extend((trajectory, (trajectory.reward - mean) / scale) for trajectory in usable)
    return Advantages(tuple(trained), tuple(zero_variance), tuple(left_out))


def _usable(trajectory: Trajectory) -> bool:
    return trajectory.outcome is Outcome.COMPLETED and trajectory.output_tokens > 0
