"""How much memory a guest may hold: the specification of watermark, cut and freeze, in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose_executor.kv_policy import (
    Cut,
    Grow,
    KvPolicy,
    KvPool,
    ServingUses,
    StepBoundary,
    in_blocks,
    in_bytes,
)

POOL = KvPool(pool_bytes=1000, serving_bytes=1000, guest_bytes=700)
"""Headroom 200, of which 100 may be used before the guest is cut."""
WATERMARK = 900


class Executor:
    """Looks every 10 ms; `policy` is the product's own."""

    def __init__(self, pool: KvPool = POOL) -> None:
        self.policy = KvPolicy(pool)
        self.now_s = 100.0

    def look(self, used_bytes: int | None, seconds: float = 0.01) -> list[Cut | Grow]:
        actions: list[Cut | Grow] = []
        for _ in range(round(seconds * 100)):
            self.now_s += 0.01
            actions += self.policy.step(ServingUses(used_bytes), self.now_s)
        return actions

    def boundary(self) -> None:
        assert not self.policy.step(StepBoundary(), self.now_s)


def test_a_guest_gets_what_the_headroom_leaves_as_soon_as_serving_is_seen() -> None:
    executor = Executor()
    assert executor.policy.budget_bytes == 0
    assert executor.look(None, 5.0) == []
    assert executor.look(300) == [Grow(500)]


def test_it_never_gets_more_than_its_own_cache() -> None:
    assert Executor().look(0) == [Grow(700)]


def test_serving_below_the_watermark_changes_nothing() -> None:
    executor = Executor()
    executor.look(300)
    assert executor.look(WATERMARK - 500, 20.0) == []


def test_beyond_the_watermark_the_budget_is_halved_at_that_very_look() -> None:
    executor = Executor()
    executor.look(300)
    assert executor.look(WATERMARK - 500 + 1) == [Cut(250, "serving uses 401 bytes")]


def test_it_is_halved_as_often_as_it_takes_and_down_to_nothing() -> None:
    executor = Executor()
    executor.look(300)
    (cut,) = executor.look(780)
    assert cut.budget_bytes == 62
    (cut,) = executor.look(900)
    assert cut.budget_bytes == 0
    assert executor.look(1000, 0.1) == []


def test_after_a_cut_it_cannot_grow_until_the_freeze_ends() -> None:
    executor = Executor(replace(POOL, window_s=5.0))
    executor.look(300)
    executor.look(450)
    assert executor.policy.frozen(executor.now_s)
    assert executor.look(100, POOL.freeze_s - 0.05) == []
    assert executor.look(100, 0.1) == [Grow(700)]
    assert not executor.policy.frozen(executor.now_s)


def test_a_cut_in_the_freeze_begins_it_anew() -> None:
    executor = Executor(replace(POOL, window_s=5.0))
    executor.look(300)
    executor.look(450)
    executor.look(100, POOL.freeze_s / 2)
    executor.look(800)
    assert executor.look(100, POOL.freeze_s - 0.05) == []
    assert executor.look(100, 0.1)
    assert executor.policy.cuts == 2


def test_the_end_of_an_rl_step_ends_the_freeze_and_the_peak_bounds_what_is_planned_then() -> None:
    executor = Executor()
    executor.look(300)
    executor.look(500)
    executor.look(100, 1.0)
    executor.boundary()
    assert executor.look(100) == [Grow(300)]  # not 700: serving has just used 500


def test_a_plan_grows_when_the_peak_is_forgotten_and_not_before_it_is_due() -> None:
    executor = Executor()
    executor.look(300)
    executor.look(0, POOL.freeze_s - 0.05)
    assert executor.policy.budget_bytes == 500
    assert executor.look(0, POOL.window_s * 1.1 + POOL.freeze_s) == [Grow(700)]


def test_serving_unknown_never_lets_it_grow() -> None:
    executor = Executor()
    executor.look(600)
    executor.boundary()
    assert executor.look(None, 0.5) == []
    assert executor.policy.budget_bytes == 200


def test_serving_unknown_for_long_leaves_what_it_can_never_need() -> None:
    executor = Executor(replace(POOL, serving_bytes=900))
    executor.look(300)
    assert executor.look(None, POOL.unknown_s - 0.05) == []
    (cut,) = executor.look(None, 0.2)
    assert 0 < cut.budget_bytes <= 100
    assert executor.look(None, 100.0) == []


def test_a_moment_in_which_serving_was_unknown_is_forgiven() -> None:
    executor = Executor()
    executor.look(300)
    for _ in range(5):
        assert executor.look(None, POOL.unknown_s * 0.8) == []
        assert executor.look(300, 0.1) == []


def test_a_burst_that_comes_again_cuts_once() -> None:
    """However often within the window: what is planned after the first leaves room for the next."""
    executor = Executor()
    executor.look(100)
    for _ in range(40):
        executor.look(650, 0.5)
        executor.look(100, 1.0)
        executor.boundary()
    assert (executor.policy.cuts, executor.policy.turns) == (1, 1)


def test_with_a_clock_that_stands_still_it_is_cut_all_the_same_and_never_grows() -> None:
    policy = KvPolicy(POOL)
    policy.step(ServingUses(300), 100.0)
    assert policy.step(ServingUses(600), 100.0)
    for used in (0, 100, 0):
        assert policy.step(ServingUses(used), 100.0) == ()
    assert policy.budget_bytes == 250


uses = st.integers(min_value=0, max_value=1000) | st.none()
ticks = st.sampled_from([0.0, 0.005, 0.02, 0.5, 7.0, 40.0])


@given(st.lists(st.tuples(uses, ticks, st.booleans()), max_size=80))
def test_whatever_serving_does_the_invariants_hold(trace: list[tuple[int | None, float, bool]]) -> None:
    policy, now_s = KvPolicy(POOL), 0.0
    for used, tick_s, boundary in trace:
        now_s += tick_s
        before, frozen = policy.budget_bytes, policy.frozen(now_s) and not boundary
        if boundary:
            policy.step(StepBoundary(), now_s)
        actions = policy.step(ServingUses(used), now_s)
        assert [action.budget_bytes for action in actions] in ([], [policy.budget_bytes])
        assert 0 <= policy.budget_bytes <= POOL.guest_bytes
        if frozen or used is None:
            assert policy.budget_bytes <= before
        if used is not None:
            assert policy.budget_bytes == 0 or used + policy.budget_bytes <= WATERMARK
        if actions and isinstance(actions[0], Grow):
            assert used is not None
            assert used + policy.budget_bytes <= POOL.pool_bytes - POOL.headroom_bytes
    assert policy.turns <= policy.cuts + policy.grows


TICK_S, LOOK_TICKS, STEP_TICKS = 0.005, 4, 10
BACK_PER_TICK = 100.0
FOLLOWED_TICKS = 2 * LOOK_TICKS + STEP_TICKS + POOL.guest_bytes / BACK_PER_TICK
"""Two looks apart, for what serving says is a look old; the guest's step under way; and all its pages given back."""


class GreedyGuest:
    """Holds all that it may at once; reads its budget once in a step, and gives pages back at a finite rate."""

    def __init__(self) -> None:
        self.held_bytes = 0.0
        self._may_bytes = 0

    def tick(self, tick: int, budget_bytes: int) -> None:
        if tick % STEP_TICKS == 0:
            self._may_bytes = budget_bytes
        self.held_bytes = max(self._may_bytes, self.held_bytes - BACK_PER_TICK)


@given(st.integers(min_value=0, max_value=2**32))
def test_serving_is_never_refused_while_it_grows_no_faster_than_promised(seed: int) -> None:
    """Bursts up to ten times the mean, from readings that are a look old."""
    random = Random(seed)
    mean = random.randint(20, 100)
    fastest_per_tick = POOL.reserve_bytes / FOLLOWED_TICKS
    policy, guest = KvPolicy(POOL), GreedyGuest()
    used, target, told = 0.0, mean, 0.0
    for tick in range(12_000):
        if random.random() < 0.01:
            target = min(POOL.serving_bytes, round(mean * random.choice((0.2, 0.5, 1, 1, 3, 10))))
        used += max(-50.0, min(fastest_per_tick, target - used))
        if random.random() < 0.005:
            policy.step(StepBoundary(), tick * TICK_S)
        if tick % LOOK_TICKS == 0:
            policy.step(ServingUses(math.ceil(told)), tick * TICK_S)
            told = used
        guest.tick(tick, policy.budget_bytes)
        assert used + guest.held_bytes <= POOL.pool_bytes


@pytest.mark.parametrize(
    "wrong", [{"headroom": 0.0}, {"headroom": 1.0}, {"watermark": 1.0}, {"pool_bytes": 0}, {"freeze_s": -1.0}]
)
def test_a_pool_that_cannot_be_shared_out_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(POOL, **wrong)  # type: ignore[arg-type]


@given(st.integers(-10, 2**50), st.integers(1, 2**45), st.integers(1, 2**20))
def test_a_budget_in_blocks_never_holds_more_bytes_than_the_budget(budget: int, cache: int, blocks: int) -> None:
    got = in_blocks(budget, cache, blocks)
    assert 0 <= got <= blocks
    assert got == 0 or got * cache <= budget * blocks
    assert got == blocks or (got + 1) * cache > budget * blocks
    assert in_bytes(got, blocks, cache) <= max(0, budget) + 1


def test_an_engine_without_blocks_uses_nothing() -> None:
    assert (in_blocks(10, 0, 0), in_bytes(0, 0, 10)) == (0, 0)
