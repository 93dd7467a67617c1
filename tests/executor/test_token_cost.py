"""What a token costs, learnt from steps."""

from __future__ import annotations

from random import Random

import pytest

from rose_executor.token_cost import TokenCost


def learnt(fixed_s: float, token_s: float, *, steps: int = 500, noise: float = 0.1, late: float = 0.0) -> TokenCost:
    source, cost = Random(0), TokenCost()
    for _ in range(steps):
        tokens = source.choice((1, 4, 30, 64, 700))
        seconds = (fixed_s + token_s * tokens) * source.uniform(1 - noise, 1 + noise)
        cost.saw(tokens, seconds * (50.0 if source.random() < late else 1.0))
    return cost


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 3e-3])
def test_it_finds_what_a_token_costs(token_s: float) -> None:
    assert learnt(0.004, token_s).token_s == pytest.approx(token_s, rel=0.1)


def test_it_follows_an_engine_that_became_slower() -> None:
    cost = learnt(0.004, 1e-4)
    source = Random(1)
    for _ in range(5000):
        tokens = source.choice((1, 64, 700))
        cost.saw(tokens, 0.004 + 5e-4 * tokens)
    assert cost.token_s == pytest.approx(5e-4, rel=0.1)


def test_steps_that_something_else_held_up_say_little() -> None:
    assert learnt(0.004, 1e-4, late=0.02).token_s == pytest.approx(1e-4, rel=0.5)


def test_steps_that_hardly_differ_tell_nothing_nor_do_a_few() -> None:
    cost = TokenCost()
    for number in range(1000):
        cost.saw(64 + number % 3, 0.01)
    assert cost.token_s == 0.0
    assert learnt(0.004, 1e-4, steps=10).token_s == 0.0


def test_it_is_never_negative_and_takes_no_nonsense() -> None:
    cost = TokenCost()
    for tokens, seconds in ((1, 0.01), (1000, 0.001)) * 50:
        cost.saw(tokens, seconds)
    assert cost.token_s == 0.0
    before = learnt(0.004, 1e-4)
    known = before.token_s
    for tokens, seconds in ((0, 1.0), (-1, 1.0), (5, 0.0), (5, -1.0), (5, float("nan")), (5, float("inf"))):
        before.saw(tokens, seconds)
    assert before.token_s == known
