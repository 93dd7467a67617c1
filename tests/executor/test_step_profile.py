"""What a step costs: four parts learnt from steps, careful where little is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.step_drift import BAND
from rose_executor.step_profile import ProfileState, StepProfile
from rose_executor.step_shape import StepShape

ANY_INT = st.one_of(st.integers(-3, 600), st.integers(-(2**70), 2**70))
STEPS = st.lists(st.tuples(ANY_INT, ANY_INT, ANY_INT, st.floats(allow_nan=True)), max_size=60)
PROBES = [StepShape(1), StepShape(64, 64, 64_000), StepShape(564, 64, 64_000), StepShape(500, 1)]


def truth(shape: StepShape, factor: float = 1.0) -> float:
    return factor * (0.003 + 1e-4 * shape.tokens + 3e-4 * shape.seqs + 2e-7 * shape.context_tokens)


def traffic(steps: int, seed: int = 1) -> list[StepShape]:
    """Batches that decode, some with a part of a prompt beside them."""
    seeded, shapes = random.Random(seed), []
    for _ in range(steps):
        seqs = seeded.randint(1, 64)
        prompt = seeded.choice((0, 0, 0, seeded.randint(1, 500)))
        shapes.append(StepShape(seqs + prompt, seqs, seqs * seeded.randint(0, 2000)))
    return shapes


def taught(
    profile: StepProfile, shapes: Iterable[StepShape], factor: float = 1.0, noise: float = 0.1, slow: float = 0.0
) -> StepProfile:
    """`slow` is the part of the steps that take 3 to 50 times as long, because something else had the processor."""
    seeded = random.Random(2)
    for at, shape in enumerate(shapes):
        spoilt = seeded.uniform(3, 50) if seeded.random() < slow else 1.0
        profile.saw(shape, truth(shape, factor) * seeded.uniform(1 - noise, 1 + noise) * spoilt, float(at))
    return profile


def off(profile: StepProfile, factor: float = 1.0) -> list[float]:
    """Told to true, for each of the probes."""
    return [profile.seconds(shape) / truth(shape, factor) for shape in PROBES]


def one_size(*steps: tuple[int, float]) -> StepProfile:
    profile = StepProfile()
    for tokens, seconds in steps:
        profile.saw(StepShape(tokens), seconds, 0.0)
    return profile


def test_it_says_what_a_token_more_costs_once_it_has_seen_a_step() -> None:
    assert StepProfile().token_s == 0.0
    profile = taught(StepProfile(), traffic(2000))
    assert profile.token_s == pytest.approx(1e-4, rel=0.25)


def test_all_parts_are_learnt_through_noise() -> None:
    profile = taught(StepProfile(), traffic(400))
    assert off(profile) == pytest.approx([1] * 4, abs=0.1)
    admitted = profile.tokens_within(truth(StepShape(300, 8, 8000)), 8192, 8, 8000)
    assert admitted == pytest.approx(300, rel=0.15)


@pytest.mark.parametrize("slow", [0.03, 0.08])
def test_steps_that_the_machine_held_up_teach_nothing(slow: float) -> None:
    assert off(taught(StepProfile(), traffic(1500), slow=slow)) == pytest.approx([1] * 4, abs=0.15)


def test_an_hour_of_decoding_does_not_make_it_forget_what_a_prompt_costs() -> None:
    profile = taught(StepProfile(), traffic(400))
    taught(profile, [StepShape(16, 16, 8000)] * 20_000)
    assert off(profile) == pytest.approx([1] * 4, abs=0.1)


@pytest.mark.parametrize("factor", [10.0, 3.0, 1.5, 0.7, 0.3])
def test_an_engine_whose_steps_cost_another_amount_is_followed(factor: float) -> None:
    profile = taught(StepProfile(), traffic(400))
    taught(profile, traffic(400, seed=3), factor)
    assert off(profile, factor) == pytest.approx([1] * 4, abs=0.15)
    assert profile.drifted is None


def test_prompts_alone_becoming_dearer_is_followed_too() -> None:
    profile = taught(StepProfile(), traffic(400))
    seeded = random.Random(4)
    for at, shape in enumerate(traffic(1500, seed=3)):
        seconds = truth(shape) + 3e-4 * (shape.tokens - shape.seqs)
        profile.saw(shape, seconds * seeded.uniform(0.9, 1.1), float(at))
    assert profile.seconds(StepShape(564, 64)) == pytest.approx(truth(StepShape(564, 64)) + 0.15, rel=0.15)
    assert profile.seconds(StepShape(64, 64)) == pytest.approx(truth(StepShape(64, 64)), rel=0.15)


def test_until_it_has_followed_the_margin_covers_what_became_slower() -> None:
    profile = taught(StepProfile(), traffic(400))
    shapes, covered = traffic(300, seed=3), []
    for at, shape in enumerate(shapes):
        taught(profile, [shape], 3.0, noise=0.0)
        covered.append(profile.seconds(PROBES[1]) / truth(PROBES[1], 3.0))
        if at == 10:
            assert profile.drifted is not None
            assert profile.drifted.factor == pytest.approx(3, rel=0.1)
            assert profile.margin > BAND
    assert min(covered[8:]) > 0.85
    assert max(covered) < 3.1  # learnt, and still with the margin: too careful for a moment
    assert covered[40:] == pytest.approx([1.0] * 260, abs=0.1)
    assert (profile.margin, profile.drifted) == (1.0, None)


def test_what_is_admitted_has_the_margin_too() -> None:
    profile = taught(StepProfile(), traffic(400))
    budget_s = truth(StepShape(200, 4, 1000))
    before = profile.tokens_within(budget_s, 8192, 4, 1000)
    taught(profile, traffic(10, seed=3), 3.0)
    assert profile.margin > 2
    admitted = profile.tokens_within(budget_s, 8192, 4, 1000)
    assert admitted < before / 2
    assert profile.seconds(StepShape(admitted, 4, 1000)) <= budget_s < profile.seconds(StepShape(admitted + 1, 4, 1000))


def test_the_first_prompts_teach_what_prompts_cost_however_far_off_the_guess_was() -> None:
    """Batches alone, nearly all of whose cost is fixed; a prompt is guessed to cost in proportion."""
    profile, fixed_s = StepProfile(), 0.01
    for at in range(300):
        profile.saw(StepShape(8, 8, 8 * at), fixed_s, float(at))
    assert profile.seconds(StepShape(500)) > 0.3
    for at in range(2):
        profile.saw(StepShape(500), fixed_s + 0.002, 300.0 + at)
    assert profile.seconds(StepShape(500)) == pytest.approx(fixed_s + 0.002, rel=0.4)


def test_a_part_that_was_nought_for_long_is_found_when_it_comes() -> None:
    profile, seeded = StepProfile(), random.Random(6)
    for at in range(4000):
        context = seeded.randint(0, 60_000)
        part = 1e-6 if at >= 3000 else 0.0
        profile.saw(StepShape(8, 8, context), 0.02 + part * context, float(at))
    assert profile.seconds(StepShape(8, 8, 50_000)) == pytest.approx(0.07, rel=0.1)
    assert profile.seconds(StepShape(8, 8, 5_000)) == pytest.approx(0.025, rel=0.1)


def test_a_fixed_cost_that_was_none_for_long_is_found_in_the_end() -> None:
    profile, seeded = StepProfile(), random.Random(6)
    for at in range(10_000):
        tokens = seeded.randint(20, 300)
        fixed = 0.004 if at >= 3000 else 0.0
        profile.saw(StepShape(tokens, seeded.randint(1, 20)), fixed + 1e-4 * tokens, float(at))
    assert profile.seconds(StepShape(20, 5)) == pytest.approx(0.006, rel=0.15)
    assert profile.seconds(StepShape(250, 5)) == pytest.approx(0.029, rel=0.1)


def test_with_one_size_seen_larger_steps_cost_in_proportion_and_smaller_ones_the_same() -> None:
    profile = one_size(*[(8, 0.01)] * 5)
    told = [profile.seconds(StepShape(tokens)) for tokens in (1, 8, 16, 80)]
    assert told == pytest.approx([0.01, 0.01, 0.02, 0.1], rel=0.01)
    assert profile.tokens_within(0.0205, 512) == 16
    assert profile.tokens_within(0.009, 512) == 0


def test_once_sizes_have_varied_smaller_steps_than_any_seen_cost_less() -> None:
    profile = one_size(*[(10, 0.011), (40, 0.041)] * 30)
    assert profile.seconds(StepShape(5)) == pytest.approx(0.006, rel=0.1)
    assert profile.tokens_within(0.0109, 512) == 9


def test_more_sequences_or_context_than_seen_cost_in_proportion_too() -> None:
    profile = StepProfile()
    for _ in range(20):
        profile.saw(StepShape(8, 8, 1000), 0.01, 0.0)
    assert profile.seconds(StepShape(8, 8, 100)) == pytest.approx(0.01, rel=0.01)
    assert profile.seconds(StepShape(16, 16, 2000)) == pytest.approx(0.02, rel=0.01)
    assert profile.seconds(StepShape(8, 8, 1000 * 100)) > 0.5


def test_a_batch_that_only_decoded_says_that_its_tokens_cost_not_its_sequences() -> None:
    """Both would explain it; a prompt of as many tokens must not come out cheaper."""
    profile = StepProfile()
    for batch in (8, 64) * 30:
        profile.saw(StepShape(batch, batch, 0), 0.001 * batch, 0.0)
    assert profile.seconds(StepShape(64, 1, 0)) == pytest.approx(0.064, rel=0.05)


def test_larger_steps_that_happened_to_cost_less_do_not_make_tokens_free_of_charge() -> None:
    profile = one_size(*[(1, 0.02), (64, 0.01)] * 30)
    assert profile.seconds(StepShape(1)) == pytest.approx(profile.seconds(StepShape(64)))
    assert 0.01 <= profile.seconds(StepShape(1)) <= 0.02
    assert profile.tokens_within(0.001, 512) == 0


def test_before_any_step_a_few_tokens_may_be_tried() -> None:
    assert StepProfile().tokens_within(0.001, 512) == 8
    assert StepProfile().tokens_within(0.001, 4) == 4
    assert StepProfile().tokens_within(0.0, 512) == 0
    assert StepProfile().seconds(StepShape(8)) == 0
    assert StepProfile().state() is None


def test_a_step_has_no_more_sequences_than_tokens() -> None:
    profile = taught(StepProfile(), traffic(400))
    few = profile.tokens_within(truth(StepShape(4, 4)), 512, 64)
    assert few == pytest.approx(4, abs=1)


def test_what_it_knows_begins_another() -> None:
    profile = taught(StepProfile(), traffic(400))
    state = profile.state()
    assert isinstance(state, ProfileState)
    again = StepProfile(state)
    assert [again.seconds(shape) for shape in PROBES] == [profile.seconds(shape) for shape in PROBES]
    assert again.steps == profile.steps == 400
    assert again.state() == state
    taught(again, traffic(100, seed=5), 2.0)
    assert profile.state() == state


def test_a_profile_of_a_much_slower_device_is_soon_forgotten() -> None:
    slow = taught(StepProfile(), traffic(400), 20.0)
    profile = taught(StepProfile(slow.state()), traffic(150, seed=7))
    assert off(profile) == pytest.approx([1] * 4, abs=0.3)


def test_steps_of_one_batch_for_long_leave_it_sound() -> None:
    """Collinear, and more of them than any sum could hold apart."""
    profile = taught(StepProfile(), [StepShape(16, 16, 16 * at % 9000) for at in range(100_000)])
    assert profile.seconds(StepShape(16, 16, 4000)) == pytest.approx(truth(StepShape(16, 16, 4000)), rel=0.05)
    assert all(math.isfinite(part) and part >= 0 for part in profile.state().parts)  # type: ignore[union-attr]


@given(STEPS, st.floats(-1, 10), st.integers(1, 600), st.integers(1, 64), st.integers(0, 10**6))
def test_what_is_admitted_fits_and_is_the_most_that_does(
    steps: list[tuple[int, int, int, float]], budget_s: float, tokens_max: int, seqs: int, context: int
) -> None:
    """Whatever was seen, absurd steps included."""
    profile = StepProfile()
    for tokens, batch, behind, seconds in steps:
        profile.saw(StepShape(tokens, batch, behind), seconds, 0.0)

    def cost(tokens: int) -> float:
        return profile.seconds(StepShape(tokens, min(seqs, tokens), context))

    admitted = profile.tokens_within(budget_s, tokens_max, seqs, context)
    assert 0 <= admitted <= tokens_max
    slack = 1e-9 * abs(budget_s)
    if admitted and profile.steps:
        assert cost(admitted) <= budget_s + slack
    if admitted < tokens_max and budget_s > 0 and profile.steps:
        assert cost(admitted + 1) > budget_s - slack
    costs = [cost(tokens) for tokens in range(1, 600)]
    assert all(math.isfinite(one) and one >= 0 for one in costs)
    assert all(more >= less - 1e-9 * more for less, more in itertools.pairwise(costs))


@given(STEPS, st.tuples(*[st.integers(1, 2000)] * 3), st.integers(0, 2), st.integers(1, 10**6))
def test_more_of_anything_never_costs_less(
    steps: list[tuple[int, int, int, float]], amounts: tuple[int, int, int], which: int, more: int
) -> None:
    profile = StepProfile()
    for tokens, batch, behind, seconds in steps:
        profile.saw(StepShape(tokens, batch, behind), seconds, 0.0)
    larger = list(amounts)
    larger[which] += more
    less = profile.seconds(StepShape(*amounts))
    assert profile.seconds(StepShape(*larger)) >= less * (1 - 1e-9)
