from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.metrics import LoadMetrics
from rose.observer.buckets import quantile, share_below
from rose.workload import latencies

BOUNDS = [0.001, 0.01, 0.1, 1.0, 10.0, math.inf]
values = st.lists(st.floats(1e-4, 9.0), min_size=1, max_size=80)
fractions = st.floats(0.0, 1.0)


def histogram(seen: list[float], bounds: list[float] = BOUNDS) -> dict[float, float]:
    return {bound: sum(value <= bound for value in seen) for bound in bounds}


def bucket(value: float) -> int:
    return next(number for number, bound in enumerate(BOUNDS) if value <= bound)


@given(values, st.floats(0.001, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value_of_that_rank(seen: list[float], fraction: float) -> None:
    found = quantile(histogram(seen), fraction)
    exact = sorted(seen)[math.ceil(fraction * len(seen)) - 1]
    assert found is not None
    at = bucket(exact)
    assert (BOUNDS[at - 1] if at else 0.0) <= found <= BOUNDS[at]


@given(values, fractions, fractions)
def test_quantiles_rise_with_their_fraction(seen: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    below, above = quantile(histogram(seen), low), quantile(histogram(seen), high)
    assert below is not None
    assert above is not None
    assert below <= above + 1e-12


@given(values, st.sampled_from(BOUNDS[:-1]))
def test_the_share_below_a_bound_is_exact(seen: list[float], limit: float) -> None:
    assert share_below(histogram(seen), limit) == pytest.approx(sum(value <= limit for value in seen) / len(seen))


@given(values, st.floats(0.0001, 20.0), st.floats(0.0001, 20.0))
def test_shares_rise_with_their_limit(seen: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    below, above = share_below(histogram(seen), low), share_below(histogram(seen), high)
    assert below is not None
    assert above is not None
    assert 0.0 <= below <= above + 1e-12 <= 1.0 + 1e-9


def test_no_values_have_neither() -> None:
    assert quantile({}, 0.5) is None
    assert quantile(histogram([]), 0.5) is None
    assert share_below(histogram([]), 1.0) is None


def test_the_largest_lies_in_its_own_bucket() -> None:
    assert quantile(histogram([0.05, 0.5]), 1.0) == 1.0
    assert quantile(histogram([0.05, 0.5]), 0.5) == 0.1


def test_what_lies_above_all_bounds_is_said_to_be_at_the_last() -> None:
    seen = {0.1: 1.0, 1.0: 1.0, math.inf: 10.0}
    assert quantile(seen, 0.99) == 1.0
    assert share_below(seen, 50.0) == pytest.approx(0.1)


def test_a_load_clients_buckets_are_fine_enough_for_percentiles() -> None:
    metrics = LoadMetrics()
    seen = [0.0007 * 1.021**step for step in range(450)]
    for value in seen:
        metrics.ttft_seconds.observe(value)
        metrics.tpot_seconds.observe(value)
    for name in ("ttft", "tpot"):
        family = next(one for one in metrics.registry.collect() if one.name == f"rose_load_{name}_seconds")
        counted = {float(one.labels["le"]): one.value for one in family.samples if one.name.endswith("_bucket")}
        for fraction in (0.5, 0.9, 0.95, 0.99):
            exact = latencies.quantile(seen, fraction)
            assert quantile(counted, fraction) == pytest.approx(exact, rel=0.11)
