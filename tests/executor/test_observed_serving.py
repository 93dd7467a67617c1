"""What successive pages of a serving engine say on the board."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.board import SERVING, encode
from rose_executor.board_states import ServingState
from rose_executor.observed_serving import ObservedServing
from rose_executor.serving_page import PageFigures, Sum

IDLE = PageFigures(0, 0, 0.0, 101, Sum(0, 0), Sum(0, 0), Sum(0, 0))


def page(**said: Any) -> PageFigures:
    return dataclasses.replace(IDLE, **said)


def test_an_engine_that_has_done_nothing_yet_is_idle() -> None:
    state = ObservedServing().saw(IDLE, 50.0)
    assert state == ServingState(kv_blocks_total=100, looked_at_s=50.0)
    assert state.idle


def test_what_runs_is_owed_its_next_token_and_what_waits_its_first() -> None:
    state = ObservedServing().saw(page(running=3, waiting=2, kv_usage=0.5), 50.0)
    assert (state.running, state.decoding, state.waiting, state.unanswered) == (3, 3, 2, 2)
    assert (state.kv_blocks_used, state.kv_blocks_total) == (50, 100)
    assert (state.arrivals, state.idle) == (0, False)  # nobody saw them come


def test_times_are_means_since_the_last_look() -> None:
    serving = ObservedServing()
    begun = page(running=1, steps=Sum(1000, 100), token_s=Sum(2.0, 100), first_token_s=Sum(0.5, 5))
    first = serving.saw(begun, 50.0)
    assert (first.next_step_s, first.first_token_s, first.step_tokens, first.steps) == (0.02, 0.1, 10, 100)
    later = page(running=1, steps=Sum(1080, 110), token_s=Sum(2.4, 110), first_token_s=Sum(0.75, 6))
    second = serving.saw(later, 50.5)
    assert second.next_step_s == second.step_s == pytest.approx(0.04)
    assert second.first_token_s == pytest.approx(0.25)
    assert (second.step_tokens, second.steps, second.stepped_at_s) == (8, 110, 50.5)


def test_a_look_that_shows_no_step_tells_no_times() -> None:
    serving = ObservedServing()
    busy = page(running=1, steps=Sum(10, 10), token_s=Sum(0.5, 10), first_token_s=Sum(0.1, 1))
    before = serving.saw(busy, 50.0)
    after = serving.saw(busy, 50.4)
    assert after == before._replace(looked_at_s=50.4)


def test_an_idle_engine_is_expected_to_step_as_it_did_all_its_life() -> None:
    serving = ObservedServing()
    serving.saw(page(running=1, token_s=Sum(1.0, 100)), 50.0)
    slow = serving.saw(page(running=1, token_s=Sum(3.0, 101)), 52.0)
    assert slow.next_step_s == pytest.approx(2.0)
    last = page(token_s=Sum(3.0, 101))
    assert serving.saw(last, 52.4).next_step_s == pytest.approx(3.0 / 101)


def test_whoever_waits_is_taken_to_have_come_right_after_the_last_look() -> None:
    serving = ObservedServing()
    seen = [
        (50.0, 1, 0, 50.0),  # nobody looked before
        (50.4, 3, 0, 50.0),
        (50.8, 2, 1, 50.0),  # one has its first token, and two came right after it
        (51.2, 2, 1, 50.0),
        (51.6, 2, 2, 51.2),
        (52.0, 0, 2, 0.0),
        (52.4, 1, 0, 52.0),
        (52.8, 1, 3, 52.4),  # that one, and two that were never seen to wait
    ]
    answered, oldest = 0, []
    for at_s, waiting, first_tokens, _ in seen:
        answered += first_tokens
        oldest.append(serving.saw(page(waiting=waiting, first_token_s=Sum(1.0, answered)), at_s).oldest_unanswered_at_s)
    assert oldest == [expected for *_, expected in seen]


def test_one_that_left_the_line_without_an_answer_is_the_oldest() -> None:
    serving = ObservedServing()
    serving.saw(page(waiting=1), 50.0)
    serving.saw(page(waiting=2), 50.4)
    serving.saw(page(waiting=3), 50.8)
    assert serving.saw(page(waiting=1), 51.2).oldest_unanswered_at_s == 50.4


def test_busy_is_what_the_steps_took_but_never_more_than_the_time() -> None:
    serving = ObservedServing()
    assert serving.saw(page(running=1, steps=Sum(0, 100), token_s=Sum(2.0, 100)), 50.0).busy_s == 0.0
    assert serving.saw(page(running=1, steps=Sum(0, 110), token_s=Sum(2.2, 110)), 50.5).busy_s == pytest.approx(0.2)
    full = serving.saw(page(running=1, steps=Sum(0, 200), token_s=Sum(4.0, 200)), 51.0)
    assert full.busy_s == pytest.approx(0.7)


def test_an_engine_that_was_started_anew_counts_from_nought() -> None:
    serving = ObservedServing()
    serving.saw(page(running=1, steps=Sum(900, 90), token_s=Sum(9.0, 90), first_token_s=Sum(9.0, 3)), 50.0)
    # Its tokens are more than its last life's already, its steps are not.
    anew = page(running=1, steps=Sum(80, 8), token_s=Sum(20.0, 1000), first_token_s=Sum(0.2, 4))
    state = serving.saw(anew, 60.0)
    assert (state.steps, state.step_tokens) == (98, 10)
    assert state.next_step_s == pytest.approx(0.02)
    assert state.first_token_s == pytest.approx(0.05)
    silent = serving.saw(IDLE, 70.0)
    assert (silent.steps, silent.next_step_s) == (98, 0.0)


def test_what_a_page_leaves_out_stays_as_it_was_told() -> None:
    serving = ObservedServing()
    serving.saw(page(running=1, steps=Sum(10, 10), token_s=Sum(0.5, 10), first_token_s=Sum(0.1, 1)), 50.0)
    bare = serving.saw(PageFigures(2, 0), 50.4)
    assert (bare.next_step_s, bare.first_token_s, bare.steps) == (0.05, 0.1, 10)
    assert (bare.kv_blocks_used, bare.kv_blocks_total) == (0, 0)  # not a figure of some time ago


SUMS = st.none() | st.builds(Sum, st.floats(0, 2.0**53), st.floats(0, 2.0**53))
PAGES = st.builds(
    PageFigures,
    running=st.integers(0, 2**20),
    waiting=st.integers(0, 300),
    kv_usage=st.none() | st.floats(0, 1),
    kv_blocks=st.none() | st.integers(0, 10**15 - 1),
    steps=SUMS,
    token_s=SUMS,
    first_token_s=SUMS,
)


@given(st.lists(st.tuples(PAGES, st.floats(0, 3600)), min_size=1, max_size=12))
def test_whatever_pages_say_the_state_makes_sense_and_fits_the_board(pages: list[tuple[PageFigures, float]]) -> None:
    serving, now_s, before = ObservedServing(), 1000.0, ServingState()
    for seen, later_s in pages:
        now_s += later_s
        state = serving.saw(seen, now_s)
        encode(SERVING, state, 1, 1)
        assert 0 <= state.next_step_s <= 3600
        assert 0 <= state.first_token_s <= 3600
        assert 0 <= state.kv_blocks_used <= state.kv_blocks_total
        assert 0 <= state.busy_s - before.busy_s <= later_s + 1e-6
        assert state.steps >= before.steps
        assert state.looked_at_s == now_s
        if state.unanswered:
            assert 1000.0 <= state.oldest_unanswered_at_s <= now_s
        assert before.oldest_unanswered_at_s <= state.oldest_unanswered_at_s or not state.unanswered
        before = state
