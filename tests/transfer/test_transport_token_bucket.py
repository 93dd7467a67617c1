"""The bucket lets bytes go at its rate, whoever takes how much when."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_transfer.transport.token_bucket import TokenBucket

RATE, BURST = 1000.0, 500


@given(st.lists(st.tuples(st.integers(0, 800), st.floats(0, 3)), max_size=40))
def test_what_leaves_in_any_time_is_bounded(takes: list[tuple[int, float]]) -> None:
    bucket, now, leaves = TokenBucket(RATE, BURST), 0.0, []
    for size_bytes, pause_s in takes:
        now += pause_s
        leaves.append((now + bucket.take(size_bytes, now), size_bytes))
    assert all(later >= earlier - 1e-9 for (earlier, _), (later, _) in pairwise(leaves))
    for first, (began_s, _) in enumerate(leaves):
        gone = 0
        for at_s, size_bytes in leaves[first:]:
            gone += size_bytes
            assert gone <= BURST + RATE * (at_s - began_s) + leaves[first][1] + 1e-6


def test_it_starts_full_fills_up_to_its_burst_and_no_further() -> None:
    bucket = TokenBucket(RATE, BURST)
    assert bucket.take(500, 0.0) == 0.0
    assert bucket.take(100, 0.0) == pytest.approx(0.1)
    assert bucket.take(500, 100.0) == 0.0
    assert bucket.take(1000, 100.0) == pytest.approx(1.0)


def test_a_bucket_that_lets_nothing_go_is_refused() -> None:
    for rate, burst in ((0.0, 1), (1.0, 0)):
        with pytest.raises(ValueError, match="lets nothing go"):
            TokenBucket(rate, burst)
