from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.observer.series import SeriesStore

FINE, PER_COARSE, COARSE, SERIES_MAX = 6, 3, 4, 3

ticks = st.lists(
    st.dictionaries(st.sampled_from("abcde"), st.floats(-1e6, 1e6), max_size=4),
    min_size=FINE + PER_COARSE * COARSE,
    max_size=40,
)


def small() -> SeriesStore[str]:
    return SeriesStore(fine=FINE, ticks_per_coarse=PER_COARSE, coarse=COARSE, series_max=SERIES_MAX)


@given(ticks)
def test_bounded_ordered_and_true_to_what_was_appended(told: list[dict[str, float]]) -> None:
    store = small()
    for at_s, values in enumerate(told):
        store.append(float(at_s), values)
        columns = store.columns()
        assert len(store) <= SERIES_MAX
        assert len(columns.times) <= FINE + COARSE
        assert all(before < after for before, after in pairwise(columns.times))
    for key, column in columns.values.items():
        assert len(column) == len(columns.times)
        for at_s, value in list(zip(columns.times, column, strict=True))[-FINE:]:
            if at_s >= len(told) - FINE and value is not None:
                assert value == told[int(at_s)][key]


@given(ticks)
def test_a_key_among_few_is_never_lost_and_its_gaps_are_gaps(told: list[dict[str, float]]) -> None:
    store = small()
    for at_s, values in enumerate(told):
        store.append(float(at_s), {key: value for key, value in values.items() if key in "abc"})
    columns, last = store.columns(), told[-FINE:]
    for key in "abc":
        if any(key in values for values in last):
            assert columns.values[key][-len(last) :] == [values.get(key) for values in last]


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=PER_COARSE * COARSE, max_size=40))
def test_what_is_no_longer_fine_is_the_mean_of_what_was_said(told: list[float | None]) -> None:
    store = small()
    for at_s, value in enumerate(told):
        store.append(float(at_s), {} if value is None else {"a": value})
    columns = store.columns()
    for at_s, value in zip(columns.times, columns.values.get("a", []), strict=False):
        if at_s < len(told) - FINE:
            said = [one for one in told[int(at_s) - PER_COARSE + 1 : int(at_s) + 1] if one is not None]
            assert value == (pytest.approx(sum(said) / len(said)) if said else None)


def test_a_new_series_takes_the_place_of_the_one_that_was_silent_longest() -> None:
    store = small()
    store.append(0.0, {"a": 1, "b": 1, "c": 1})
    store.append(1.0, {"b": 1, "c": 1})
    store.append(2.0, {"c": 1})
    store.append(3.0, {"c": 1, "d": 4})
    assert sorted(store.keys()) == ["b", "c", "d"]
    assert store.columns(["d"]).values == {"d": [None, None, None, 4]}
    assert store.refused == 0


def test_where_all_speak_a_new_one_is_refused_and_counted() -> None:
    store = small()
    for at_s in range(3):
        store.append(float(at_s), {"a": 1, "b": 1, "c": 1})
    store.append(3.0, {"a": 1, "b": 1, "c": 1, "d": 1})
    assert sorted(store.keys()) == ["a", "b", "c"]
    assert store.refused == 1


def test_what_has_long_been_silent_is_forgotten() -> None:
    store = small()
    store.append(0.0, {"a": 1})
    for at_s in range(1, PER_COARSE * COARSE + FINE):
        store.append(float(at_s), {"b": 1})
    assert store.keys() == ["b"]


def test_time_only_rises() -> None:
    store = small()
    store.append(1.0, {})
    with pytest.raises(ValueError, match="went back"):
        store.append(1.0, {})
    assert not math.isnan(store.columns().times[0])
