"""What a serving engine's steps and arrivals say on the board."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.board_states import ServingState
from rose_executor.serving_steps import ServingSteps

STEP = {"running": 1, "waiting": 0, "kv_usage": 0.0, "tokens": 1, "prompt_tokens": 0, "first_tokens": 0, "finished": 0}


def step(steps: ServingSteps, now_s: float, **said: Any) -> ServingState:
    return steps.stepped(now_s=now_s, **(STEP | said))


def test_before_the_first_step_nothing_runs() -> None:
    assert ServingSteps(500, 10.0).state == ServingState(stepped_at_s=10.0, kv_blocks_total=500)
    assert ServingSteps(500, 10.0).state.idle


def test_a_step_tells_its_load() -> None:
    said = step(ServingSteps(500, 10.0), 11.0, running=3, waiting=2, kv_usage=0.5, tokens=70, first_tokens=3)
    assert (said.steps, said.running, said.waiting, said.step_tokens, said.kv_blocks_used) == (1, 3, 2, 70, 250)
    assert (said.decoding, said.unanswered, said.oldest_unanswered_at_s, said.stepped_at_s) == (3, 2, 11.0, 11.0)
    assert not said.idle


def test_only_steps_that_follow_one_another_have_a_duration() -> None:
    steps = ServingSteps(500, 0.0)
    assert step(steps, 10.0).step_s == 0.0  # after idling: nobody knows when it began
    assert step(steps, 10.25).step_s == 0.25
    assert step(steps, 10.375, running=0).step_s == 0.125  # the last of these requests ended in it
    assert step(steps, 50.0).step_s == 0.125  # a pause is no step
    assert step(steps, 50.5).step_s == 0.5


def test_a_step_of_an_idle_engine_began_when_a_request_arrived() -> None:
    steps = ServingSteps(500, 0.0)
    steps.arrived(1, 10.0)
    steps.arrived(2, 10.125)
    assert step(steps, 10.25).step_s == 0.25


def test_busy_is_what_steps_took_and_not_the_pauses() -> None:
    steps = ServingSteps(500, 0.0)
    assert step(steps, 10.0).busy_s == 0.0  # the first step: nothing is known yet
    assert step(steps, 10.25).busy_s == 0.25
    assert step(steps, 10.5, running=0).busy_s == 0.5
    assert step(steps, 50.0).busy_s == 0.75  # a pause, and a step as long as the one before
    assert step(steps, 50.125, running=0).busy_s == 0.875
    assert step(steps, 50.1875).busy_s == 0.9375  # one that is shorter than that for sure


def test_who_is_unanswered_is_told_by_arrival_where_nobody_saw_it() -> None:
    steps = ServingSteps(500, 0.0)
    seen = [(1.0, 0, 0), (2.0, 1, 0), (3.0, 3, 0), (4.0, 3, 0), (5.0, 2, 1), (6.0, 1, 1), (7.0, 2, 0), (9.0, 0, 2)]
    oldest = [
        step(steps, now_s, running=0, waiting=waiting, first_tokens=first, finished=first).oldest_unanswered_at_s
        for now_s, waiting, first in seen
    ]
    assert oldest == [0.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 0.0]


def test_a_request_in_the_middle_of_its_prompt_is_unanswered_though_it_runs() -> None:
    steps = ServingSteps(500, 0.0)
    half = step(steps, 1.0, running=1, tokens=256, prompt_tokens=256)
    assert (half.decoding, half.unanswered, half.oldest_unanswered_at_s) == (0, 1, 1.0)
    whole = step(steps, 1.5, running=1, tokens=44, prompt_tokens=44, first_tokens=1)
    assert (whole.decoding, whole.unanswered) == (1, 0)
    over = step(steps, 1.6, running=0, finished=1)
    assert over.idle


def test_an_arrival_is_seen_at_once_and_counts_from_then() -> None:
    steps = ServingSteps(500, 0.0)
    state = steps.arrived(7, 3.0)
    assert (state.unanswered, state.oldest_unanswered_at_s, state.arrivals, state.idle) == (1, 3.0, 1, False)
    taken_in = step(steps, 3.4, running=1, tokens=100, prompt_tokens=100)
    assert (taken_in.unanswered, taken_in.oldest_unanswered_at_s) == (1, 3.0)
    answered = step(steps, 3.5, running=1, tokens=50, prompt_tokens=50, first_tokens=1)
    assert (answered.unanswered, answered.decoding) == (0, 1)
    step(steps, 3.6, running=0, finished=1)
    assert steps.left(7).idle


@pytest.mark.parametrize("leaves", ["refused", "answered before it left"])
def test_a_request_that_ends_is_owed_nothing(leaves: str) -> None:
    steps = ServingSteps(500, 0.0)
    steps.arrived(1, 1.0)
    steps.arrived(2, 2.0)
    if leaves == "refused":
        assert steps.left(1).oldest_unanswered_at_s == 2.0
    else:
        step(steps, 2.5, running=2, first_tokens=1)
        assert steps.state.oldest_unanswered_at_s == 2.0
        steps.left(1)
    assert steps.state.unanswered >= 1
    steps.left(2)
    step(steps, 3.0, running=0, finished=2)
    assert steps.state.idle


def test_what_a_first_token_takes_is_learnt_from_the_longest_recent_prompts() -> None:
    steps, now_s = ServingSteps(500, 0.0), 1.0
    for prompt in (100, 300) * 20:
        now_s += 0.001 * prompt
        step(steps, now_s, running=1, tokens=prompt, prompt_tokens=prompt, first_tokens=1, finished=1)
    for _ in range(20):
        now_s += 0.01
        step(steps, now_s, running=1, tokens=1)
    idle = step(steps, now_s + 0.01, running=0, finished=1)
    assert idle.first_token_s == pytest.approx(0.3, rel=0.1)
    waiting = steps.arrived(1, now_s + 1.0)
    assert waiting.next_step_s == pytest.approx(waiting.first_token_s)
    decoding = ServingSteps(500, 0.0)
    for tick in range(20):
        last = step(decoding, tick * 0.01, running=4, tokens=4, first_tokens=4 if not tick else 0)
    assert last.next_step_s == pytest.approx(0.01, rel=0.01)


@given(st.integers(0, 2**32))
def test_books_never_owe_a_negative_number_and_end_at_nought(seed: int) -> None:
    """A random engine, seen with every arrival: what is told agrees with it as long as it answers in order."""
    source, steps, now_s, number = random.Random(seed), ServingSteps(500, 0.0), 1.0, 0
    line: list[tuple[int, float]] = []
    decoding: list[int] = []
    for _ in range(200):
        now_s += source.uniform(0.001, 0.1)
        if source.random() < 0.4:
            number += 1
            line.append((number, now_s))
            state = steps.arrived(number, now_s)
        elif line or decoding:
            first = [line.pop(0)[0] for _ in range(source.randint(0, len(line)))]
            decoding += first
            over = [decoding.pop(0) for _ in range(source.randint(0, len(decoding)))]
            for one in over:
                steps.left(one)
            state = step(
                steps,
                now_s,
                running=len(decoding),
                waiting=len(line),
                first_tokens=len(first),
                finished=len(over),
                prompt_tokens=9 * len(first),
                tokens=9 * len(first) + len(decoding),
            )
        else:
            state = steps.state
        assert (state.unanswered, state.decoding) == (len(line), len(decoding))
        assert state.oldest_unanswered_at_s == (line[0][1] if line else 0.0)
        assert state.next_step_s >= 0
        assert state.first_token_s >= 0
    assert state.arrivals == number
