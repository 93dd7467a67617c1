"""What a request may say of prefixes, and what is read of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.keep_prefix import EXTRA_ARG, FORGET_MAX, SECONDS_MAX, Keep, read_keep

SAID = Keep("trajectory", 7, 60.0, ("one", "two"))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_what_is_said_is_read() -> None:
    assert read_keep(SAID.extra_args()) == SAID
    assert read_keep(Keep(forget=("one",)).extra_args()) == Keep(forget=("one",))


@pytest.mark.parametrize("said", [None, {}, {"another": 1}, {EXTRA_ARG: "trajectory"}, {EXTRA_ARG: ["trajectory"]}])
def test_who_says_nothing_gets_nothing_kept(said: dict[str, Any] | None) -> None:
    assert read_keep(said) == Keep()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("keep", value) for value in ("", "x" * 257, 3, None, ["a"])),
        *(("rank", value) for value in (-1, 2**60, 1.5, "3", None)),
        *(("seconds", value) for value in (0, -1.0, math.nan, math.inf, "60", None)),
    ],
)
def test_what_makes_no_sense_keeps_nothing_and_forgets_all_the_same(field: str, value: Any) -> None:
    said = {**SAID.extra_args()[EXTRA_ARG], field: value}
    assert read_keep({EXTRA_ARG: said}) == Keep(forget=("one", "two"))


def test_it_is_bounded() -> None:
    assert read_keep({EXTRA_ARG: {"keep": "a", "rank": 0, "seconds": 10**400}}).seconds == SECONDS_MAX
    read = read_keep(Keep("a", 0, 1e9, tuple(map(str, range(FORGET_MAX + 1)))).extra_args())
    assert (read.seconds, len(read.forget)) == (SECONDS_MAX, FORGET_MAX)


@given(st.dictionaries(st.sampled_from(["keep", "rank", "seconds", "forget"]), anything) | anything)
def test_nothing_raises(said: Any) -> None:
    read = read_keep({EXTRA_ARG: said})
    assert read == read_keep(read.extra_args())
