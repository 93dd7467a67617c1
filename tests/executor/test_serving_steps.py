"""What a serving engine's steps say on the board."""

from __future__ import annotations

from rose_executor.board_states import ServingState
from rose_executor.serving_steps import ServingSteps


def step(
    steps: ServingSteps, now_s: float, running: int = 1, waiting: int = 0, usage: float = 0.0, tokens: int = 1
) -> ServingState:
    return steps.stepped(running=running, waiting=waiting, kv_usage=usage, tokens=tokens, now_s=now_s)


def test_before_the_first_step_nothing_runs() -> None:
    assert ServingSteps(500, 10.0).state == ServingState(0, 0, 0, 0.0, 10.0, 0.0, 0, 0, 500, 0.0)


def test_a_step_tells_its_load() -> None:
    assert step(ServingSteps(500, 10.0), 11.0, 3, 2, usage=0.5, tokens=70) == ServingState(
        1, 3, 2, 11.0, 11.0, 0.0, 70, 250, 500, 0.0
    )


def test_only_steps_that_follow_one_another_have_a_duration() -> None:
    steps = ServingSteps(500, 0.0)
    assert step(steps, 10.0).step_s == 0.0  # after idling: nobody knows when it began
    assert step(steps, 10.25).step_s == 0.25
    assert step(steps, 10.375, running=0).step_s == 0.125  # the last of these requests ended in it
    assert step(steps, 50.0).step_s == 0.125  # a pause is no step
    assert step(steps, 50.5).step_s == 0.5


def test_busy_is_what_steps_took_and_not_the_pauses() -> None:
    steps = ServingSteps(500, 0.0)
    assert step(steps, 10.0).busy_s == 0.0  # the first step: nothing is known yet
    assert step(steps, 10.25).busy_s == 0.25
    assert step(steps, 10.5, running=0).busy_s == 0.5
    assert step(steps, 50.0).busy_s == 0.75  # a pause, and a step as long as the one before
    assert step(steps, 50.125, running=0).busy_s == 0.875
    assert step(steps, 50.1875).busy_s == 0.9375  # one that is shorter than that for sure


def test_the_oldest_wait_is_that_of_who_came_first() -> None:
    steps = ServingSteps(500, 0.0)
    seen = [(1.0, 0), (2.0, 1), (3.0, 3), (4.0, 3), (5.0, 2), (6.0, 1), (7.0, 2), (8.0, 1), (9.0, 0), (10.0, 1)]
    oldest = [step(steps, now_s, waiting=waiting).oldest_waiting_at_s for now_s, waiting in seen]
    assert oldest == [0.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 7.0, 0.0, 10.0]
