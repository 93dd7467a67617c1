"""What counts as equal: the largest difference over the ids that both sides name."""

from __future__ import annotations

import math

import pytest

from rose.errors import ContractError
from rose_executor.fresh_probe import ProbeScores, compare

TEN = {token: -0.1 * token for token in range(10)}


def test_the_largest_difference_anywhere_counts() -> None:
    live = ProbeScores((TEN, TEN))
    assert compare(live, live) == 0
    assert compare(live, ProbeScores((TEN, {**TEN, 4: -0.9}))) == pytest.approx(0.5)


def test_a_tie_at_the_edge_of_the_list_is_no_difference() -> None:
    other = {token: value for token, value in TEN.items() if token != 9} | {11: -0.9}
    assert compare(ProbeScores((TEN,)), ProbeScores((other,))) == 0


def test_mostly_different_ids_are_another_distribution() -> None:
    other = {token + 3: value for token, value in TEN.items()}
    with pytest.raises(ContractError, match="7 of 10 likely tokens"):
        compare(ProbeScores((TEN,)), ProbeScores((other,)))
    with pytest.raises(ContractError, match="0 of 0"):
        compare(ProbeScores(({},)), ProbeScores(({},)))


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_a_number_differs_from_everything(order: int) -> None:
    broken = {**TEN, 4: math.nan}
    assert compare(*(ProbeScores((TEN, TEN)), ProbeScores((broken, TEN)))[::order]) == math.inf


def test_other_questions_cannot_be_compared() -> None:
    with pytest.raises(ContractError, match="2 live probes against 1"):
        compare(ProbeScores((TEN, TEN)), ProbeScores((TEN,)))
