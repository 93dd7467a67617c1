"""Latencies are drawn as the presets say, by counting, and only their seed and their place decide them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log, sqrt
from statistics import NormalDist
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.config import EnvironmentConfig
from rose.env.latency import PRESETS, LatencyPreset, LatencySampler

DRAWS = 20_000
NORMAL = NormalDist()
NEVER_S = 1e9
presets = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())


def log_normal(median_s: float, sigma: float) -> Callable[[float], float]:
    """Share of draws that are at most so long."""
    return lambda seconds: NORMAL.cdf(log(seconds / median_s) / sigma)


def step_share(preset: LatencyPreset) -> Callable[[float], float]:
    """The same of a step over many tasks, stragglers included."""
    sigma, slow = sqrt(preset.step_sigma**2 + preset.task_sigma**2), preset.slow_probability
    quick = log_normal(preset.step_median_s, sigma)
    late = log_normal(preset.step_median_s * preset.slow_factor, sigma)
    return lambda seconds: (1 - slow) * quick(seconds) + slow * late(seconds)


def agrees(draws: list[float], share: Callable[[float], float], preset: LatencyPreset) -> None:
    """Count those below points all over the range: each within four standard errors of what is stated."""
    for at in (0.05, 0.25, 0.5, 1, 2, 4, 8, 16):
        seconds = preset.step_median_s * at
        if seconds < preset.longest_s:
            stated = share(seconds)
            error = 4 * sqrt(stated * (1 - stated) / len(draws)) + 1 / len(draws)
            assert sum(draw <= seconds for draw in draws) / len(draws) == pytest.approx(stated, abs=error)


@presets
def test_steps_of_many_tasks_are_distributed_as_stated(preset: LatencyPreset) -> None:
    sampler = LatencySampler(preset, seed=1)
    drawn = [sampler.step(task, "s1g0-0", 0) for task in range(DRAWS)]
    agrees([each.seconds for each in drawn], step_share(preset), preset)
    late = 1 - step_share(preset)(preset.longest_s)
    error = 4 * sqrt(late / DRAWS) + 1 / DRAWS
    assert sum(each.timed_out for each in drawn) / DRAWS == pytest.approx(late, abs=error)


@presets
def test_resets_are_distributed_as_stated(preset: LatencyPreset) -> None:
    sampler = LatencySampler(preset, seed=1)
    draws = [sampler.reset(task, "s1g0-0").seconds for task in range(DRAWS)]
    agrees(draws, log_normal(preset.reset_median_s, preset.reset_sigma), preset)


@presets
def test_the_turns_of_one_task_share_its_factor_and_nothing_else(preset: LatencyPreset) -> None:
    sampler = LatencySampler(replace(preset, slow_probability=0.0, longest_s=NEVER_S), seed=1)
    tasks, turns = 2000, 10
    drawn = [[log(sampler.step(task, f"e{task}", turn).seconds) for turn in range(turns)] for task in range(tasks)]
    means = [sum(row) / turns for row in drawn]
    within = sum((each - mean) ** 2 for row, mean in zip(drawn, means, strict=True) for each in row)
    middle = sum(means) / tasks
    between = sum((mean - middle) ** 2 for mean in means) / (tasks - 1)
    step_variance, task_variance = preset.step_sigma**2, preset.task_sigma**2
    # Four standard errors of an estimated variance.
    assert within / (tasks * (turns - 1)) == pytest.approx(step_variance, rel=4 * sqrt(2 / (tasks * (turns - 1))))
    assert between == pytest.approx(task_variance + step_variance / turns, rel=4 * sqrt(2 / tasks))
    assert exp(middle) == pytest.approx(preset.step_median_s, rel=4 * sqrt(between / tasks))


@presets
@given(seed=st.integers(0, 9), task=st.integers(0, 10**6), episode=st.text(max_size=9), order=st.permutations(range(6)))
def test_only_seed_task_episode_and_turn_decide_and_not_the_order(
    preset: LatencyPreset, seed: int, task: int, episode: str, order: list[int]
) -> None:
    preset = replace(preset, longest_s=NEVER_S)
    in_turn = [LatencySampler(preset, seed).step(task, episode, turn) for turn in range(6)]
    sampler = LatencySampler(preset, seed)
    reset = sampler.reset(task, episode)
    mixed = {turn: sampler.step(task, episode, turn) for turn in order}
    assert [mixed[turn] for turn in range(6)] == in_turn
    assert len(set(in_turn)) == 6
    assert sampler.reset(task, episode) == reset
    assert sampler.step(task, episode + "x", 0) != in_turn[0]
    assert LatencySampler(preset, seed + 10).step(task, episode, 0) != in_turn[0]


@presets
@given(task=st.integers(), turn=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3))
def test_no_latency_is_endless_and_a_scale_changes_time_alone(
    preset: LatencyPreset, task: int, turn: int, scale: float
) -> None:
    once, scaled = (LatencySampler(preset, 3, by).step(task, "e", turn) for by in (1.0, scale))
    assert 0 < once.seconds <= preset.longest_s
    assert scaled.seconds == pytest.approx(once.seconds * scale)
    assert scaled.timed_out == once.timed_out


def test_the_job_file_knows_the_presets() -> None:
    assert get_args(EnvironmentConfig.model_fields["latency"].annotation) == ("none", *PRESETS)


def test_the_same_seed_means_the_same_latencies_in_every_process() -> None:
    first = LatencySampler(PRESETS["tool"], seed=0).step(7, "s1g0-0", 0)
    assert first.seconds == pytest.approx(0.4937264335384135)
