"""The comparison of an engine's answer with what its version must answer."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_executor.known_answers import TOLERANCE_NATS, compare
from rose_transfer.distribution.known_answer import KnownAnswer

OUTPUT = (1, 2, 3)
LIKELY = ({1: -0.5, 7: -1.5, 8: -2.5}, {2: -0.25, 7: -2.0, 8: -3.0}, {3: -1.0, 7: -1.25, 9: -1.5})
ANSWER = KnownAnswer((5,), OUTPUT, LIKELY)


def with_place(place: int, changed: dict[int, float]) -> list[dict[int, float]]:
    return [changed if at == place else dict(likely) for at, likely in enumerate(LIKELY)]


def test_the_same_agrees_over_all_places() -> None:
    found = compare(ANSWER, OUTPUT, LIKELY, "float32")
    assert (found.agrees, found.difference, found.places) == (True, 0.0, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_tolerance_is_that_of_the_arithmetic(dtype: str, sign: int) -> None:
    allowed = TOLERANCE_NATS[dtype]
    for off, agrees in ((0.9 * allowed, True), (1.1 * allowed, False)):
        changed = {**LIKELY[1], 7: -2.0 + sign * off}
        found = compare(ANSWER, OUTPUT, with_place(1, changed), dtype)
        assert found.difference == pytest.approx(off)
        assert found.agrees is agrees


def test_a_token_that_one_side_alone_names_must_not_be_likelier_than_what_the_other_names() -> None:
    edge = with_place(0, {1: -0.5, 7: -1.5, 6: -2.501})  # 8 and 6 are about as likely
    assert compare(ANSWER, OUTPUT, edge, "float32").difference == pytest.approx(0.001)
    unknown = with_place(0, {1: -0.5, 7: -1.5, 6: -2.0})
    assert compare(ANSWER, OUTPUT, unknown, "float32").difference == pytest.approx(0.5)
    forgotten = with_place(0, {1: -0.5, 8: -2.5, 6: -2.6})
    assert compare(ANSWER, OUTPUT, forgotten, "float32").difference == pytest.approx(1.1)


def test_where_the_two_go_different_ways_nothing_is_said_of_what_follows() -> None:
    wild = [dict(LIKELY[0]), {2: -0.25, 7: -2.0, 8: -3.0}, {50: -9.0}]
    found = compare(ANSWER, (1, 7, 50), wild, "float32")
    assert (found.agrees, found.places) == (True, 2)
    assert not compare(ANSWER, (1, 2, 50), wild, "float32").agrees


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(3))
def test_what_is_no_number_never_agrees(value: float, place: int) -> None:
    found = compare(ANSWER, OUTPUT, with_place(place, {**LIKELY[place], 7: value}), "bfloat16")
    assert found.difference == math.inf
    assert not found.agrees


@pytest.mark.parametrize(("output", "likely"), [((), ()), (OUTPUT, ({}, {}, {}))])
def test_no_answer_does_not_agree(output: tuple[int, ...], likely: tuple[dict[int, float], ...]) -> None:
    assert not compare(ANSWER, output, likely, "bfloat16").agrees


@settings(derandomize=True)
@given(st.integers(0, 2**32), st.floats(0, 0.2))
def test_two_sides_that_differ_by_no_more_than_that_are_never_told_further_apart(seed: int, most: float) -> None:
    """Whichever tokens stand at the edge of either list."""
    draw = random.Random(seed)
    whole = {token: draw.uniform(-8, -1) for token in range(30)}
    other = {token: value + draw.uniform(-most, most) for token, value in whole.items()}

    def top(values: dict[int, float]) -> dict[int, float]:
        return dict(sorted(values.items(), key=lambda item: -item[1])[:10])

    answer = KnownAnswer((1,), (max(whole, key=whole.__getitem__),), (top(whole),))
    found = compare(answer, (max(other, key=other.__getitem__),), (top(other),), "float32")
    assert found.difference <= 2 * most + 1e-9
