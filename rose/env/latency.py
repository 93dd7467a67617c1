"""How long tools take: presets, and the sampler that draws from them.

A call takes `median_s` times a log-normal factor; a step also the factor of its task, which all attempts of a group
share (a hard task is slow for everybody); now and then a call is a straggler. No call takes longer than `longest_s`.

Invariants
- The same seed, task, episode and turn always give the same latency, whatever was drawn before.
- What is scaled is time alone: which calls are slow or time out is the same at every scale.

Source of the figures: chosen, not measured on tools. In a simulation of one synchronous rollout (16 groups of 8, turns
as the demo's policy takes them before it is trained, a token step of 10 to 20 ms and about 1 ms more per active
sequence) they give

    preset   longest over median trajectory   share of the rollout after 90 % of the trajectories are done
    none     1.3                              1 %
    fast     1.25                             8 %
    tool     4.2 to 5.1                       52 %
    swe      6.2 to 6.8                       50 %

so that `tool` and `swe` leave an engine nearly idle for half of a rollout, as agents with real tools do. On an engine
of another speed, scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import exp
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LatencyPreset:
    """Medians in seconds; each `sigma` is the standard deviation of the natural logarithm."""

    step_median_s: float
    step_sigma: float
    reset_median_s: float
    reset_sigma: float
    task_sigma: float
    slow_probability: float
    slow_factor: float
    longest_s: float


PRESETS = {
    "fast": LatencyPreset(0.05, 0.5, 0.1, 0.5, 0.3, 0.005, 10.0, 5.0),
    "tool": LatencyPreset(0.4, 0.8, 0.8, 0.7, 0.5, 0.02, 8.0, 20.0),
    "swe": LatencyPreset(1.0, 1.0, 3.0, 0.8, 0.7, 0.03, 8.0, 45.0),
}
"""By the name in a job file; there, "none" adds nothing. The simulation of `fast` had no longest call."""


@dataclass(frozen=True, slots=True)
class Latency:
    """`timed_out`: it would have taken longer than the longest call, and is that long."""

    seconds: float
    timed_out: bool


class LatencySampler:
    """Draws from a preset; every latency is multiplied by `time_scale`."""

    def __init__(self, preset: LatencyPreset, seed: int, time_scale: float = 1.0) -> None:
        self._preset = preset
        self._seed = seed
        self._time_scale = time_scale

    def reset(self, task_seed: int, episode_id: str) -> Latency:
        """Of beginning an episode."""
        preset = self._preset
        key = (self._seed, "reset", task_seed, episode_id)
        return self._within_longest(_log_normal(preset.reset_median_s, preset.reset_sigma, *key))

    def step(self, task_seed: int, episode_id: str, turn: int) -> Latency:
        """Of the answer to one action; the first turn is 0."""
        preset = self._preset
        key = (self._seed, "step", task_seed, episode_id, turn)
        task_factor = _log_normal(1.0, preset.task_sigma, self._seed, "task", task_seed)
        seconds = task_factor * _log_normal(preset.step_median_s, preset.step_sigma, *key)
        slow = _uniform(*key, "slow") < preset.slow_probability
        return self._within_longest(seconds * preset.slow_factor if slow else seconds)

    def _within_longest(self, seconds: float) -> Latency:
        longest_s = self._preset.longest_s
        return Latency(min(seconds, longest_s) * self._time_scale, seconds > longest_s)


def _log_normal(median: float, sigma: float, *key: object) -> float:
    return median * exp(sigma * _NORMAL.inv_cdf(_uniform(*key)))


def _uniform(*key: object) -> float:
    """Above 0 and below 1, decided by the key alone."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return ((int.from_bytes(digest) >> 11) + 0.5) / 2**53
