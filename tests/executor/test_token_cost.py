"""What a token costs, learnt from steps."""

from __future__ import annotations

from random import Random

import pytest

from rose_executor.token_cost import TokenCost


def learnt(
    fixed_s: float, token_s: float, *, sequence_s: float = 0.0, steps: int = 500, noise: float = 0.1, late: float = 0.0
) -> TokenCost:
    source, cost = Random(0), TokenCost()
    for _ in range(steps):
        sequences, context = source.randint(1, 64), source.choice((0, 0, 0, 30, 200, 900))
        tokens = sequences + context
        seconds = (fixed_s + sequence_s * sequences + token_s * tokens) * source.uniform(1 - noise, 1 + noise)
        cost.saw(tokens, sequences, seconds * (50.0 if source.random() < late else 1.0))
    return cost


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 3e-3])
def test_it_finds_what_a_token_costs(token_s: float) -> None:
    assert learnt(0.004, token_s).token_s == pytest.approx(token_s, rel=0.1)


def test_a_token_of_a_context_is_told_from_a_sequence_that_samples() -> None:
    assert learnt(0.004, 5e-5, sequence_s=2e-4).token_s == pytest.approx(5e-5, rel=0.2)


def test_steps_that_only_sample_do_not_say_what_a_context_costs() -> None:
    source, cost = Random(0), TokenCost()
    for _ in range(1000):
        sequences = source.randint(1, 64)
        cost.saw(sequences, sequences, 0.004 + 2e-4 * sequences)
    assert cost.token_s == 0.0


def test_it_follows_an_engine_that_became_slower() -> None:
    cost = learnt(0.004, 1e-4)
    source = Random(1)
    for _ in range(5000):
        tokens = source.choice((1, 64, 700))
        cost.saw(tokens, source.randint(1, 9), 0.004 + 5e-4 * tokens)
    assert cost.token_s == pytest.approx(5e-4, rel=0.1)


def test_steps_that_something_else_held_up_say_little() -> None:
    assert learnt(0.004, 1e-4, late=0.02).token_s == pytest.approx(1e-4, rel=0.5)


def test_steps_that_hardly_differ_tell_nothing_nor_do_a_few() -> None:
    cost = TokenCost()
    for number in range(1000):
        cost.saw(64 + number % 3, 1, 0.01)
    assert cost.token_s == 0.0
    assert learnt(0.004, 1e-4, steps=10).token_s == 0.0


def test_it_is_never_negative_and_takes_no_nonsense() -> None:
    cost = TokenCost()
    for tokens, seconds in ((1, 0.01), (1000, 0.001)) * 50:
        cost.saw(tokens, 1, seconds)
    assert cost.token_s == 0.0
    before = learnt(0.004, 1e-4)
    known = before.token_s
    for tokens, seconds in ((0, 1.0), (-1, 1.0), (5, 0.0), (5, -1.0), (5, float("nan")), (5, float("inf"))):
        before.saw(tokens, 1, seconds)
    before.saw(5, 0, 1.0)
    assert before.token_s == known
