"""An engine's lives: the state table of the docstring, and any order of events whatever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rose.driver.core import After
from rose_executor.engine_health import (
    Died,
    End,
    EngineHealth,
    EngineState,
    GiveUp,
    HealthAction,
    HealthEvent,
    HeldDown,
    LetUp,
    Ready,
    Start,
    Wanted,
    Watch,
)


def fed(health: EngineHealth, *events: HealthEvent, now: float = 0.0) -> tuple[HealthAction, ...]:
    """The actions of the last event."""
    actions: tuple[HealthAction, ...] = ()
    for event in events:
        actions = health.step(event, now)
    return actions


def delay_s(actions: tuple[HealthAction, ...]) -> float:
    (timer,) = actions
    assert isinstance(timer, After)
    assert timer.event == Wanted()
    return timer.delay_s


TO: dict[EngineState, tuple[HealthEvent, ...]] = {
    EngineState.IDLE: (),
    EngineState.STARTING: (Wanted(),),
    EngineState.READY: (Wanted(), Ready()),
    EngineState.WAITING: (Wanted(), Ready(), Died("x")),
    EngineState.HELD: (Wanted(), HeldDown(), Died("x")),
    EngineState.GAVE_UP: (Wanted(), Died("x"), Wanted(), Died("x")),
}
MOVES = {
    (EngineState.IDLE, Wanted()): (EngineState.STARTING, Start),
    (EngineState.WAITING, Wanted()): (EngineState.STARTING, Start),
    (EngineState.STARTING, Ready()): (EngineState.READY, Watch),
    (EngineState.STARTING, Died("x")): (EngineState.WAITING, After),
    (EngineState.READY, Died("x")): (EngineState.WAITING, After),
    (EngineState.STARTING, HeldDown()): (EngineState.STARTING, End),
    (EngineState.READY, HeldDown()): (EngineState.READY, End),
    (EngineState.HELD, LetUp()): (EngineState.STARTING, Start),
}
EVENTS = (Wanted(), Ready(), Died("x"), HeldDown(), LetUp())


@pytest.mark.parametrize(("state", "event"), list(itertools.product(EngineState, EVENTS)))
def test_the_state_table(state: EngineState, event: HealthEvent) -> None:
    health = EngineHealth(restarts_max=1)
    fed(health, *TO[state])
    assert health.state is state
    actions = health.step(event, 0.0)
    after, action = MOVES.get((state, event), (state, None))
    assert health.state is after
    assert [type(each) for each in actions] == ([] if action is None else [action])


def test_deaths_beyond_the_last_restart_give_the_engine_up() -> None:
    health = EngineHealth(restarts_max=2)
    for _ in range(2):
        fed(health, Wanted(), Ready(), Died("killed"))
    assert fed(health, Wanted(), Ready(), Died("the third")) == (GiveUp("the third"),)
    assert health.restarts == 2


def test_no_restart_at_all_can_be_asked_for() -> None:
    assert fed(EngineHealth(restarts_max=0), Wanted(), Died("x")) == (GiveUp("x"),)


def test_what_does_not_live_long_is_spaced_out_ready_or_not_and_a_good_while_begins_anew() -> None:
    health = EngineHealth(restarts_max=100, backoff_s=1.0, backoff_max_s=5.0, good_s=10.0)
    assert delay_s(fed(health, Wanted(), Died("x"))) == 1.0
    assert delay_s(fed(health, Wanted(), Ready(), Died("x"))) == 2.0
    fed(health, Wanted(), Ready(), now=100.0)
    assert delay_s(fed(health, Died("x"), now=109.9)) == 4.0
    assert [delay_s(fed(health, Wanted(), Died("x"), now=200.0)) for _ in range(2)] == [5.0, 5.0]
    fed(health, Wanted(), Ready(), now=300.0)
    assert delay_s(fed(health, Died("x"), now=310.0)) == 0.0
    assert delay_s(fed(health, Wanted(), Died("x"), now=320.0)) == 1.0


def test_a_thousand_failures_are_no_longer_apart_than_the_longest_delay() -> None:
    health = EngineHealth(restarts_max=3000, backoff_max_s=30.0)
    delays = [delay_s(fed(health, Wanted(), Died("x"))) for _ in range(3000)]
    assert delays == sorted(delays)
    assert delays[-1] == 30.0


def test_it_says_when_the_next_restart_is_due() -> None:
    health = EngineHealth(restarts_max=3, backoff_s=2.0)
    assert health.words(0.0) == ""
    fed(health, Wanted(), Died("x"), now=10.0)
    assert health.words(10.5) == "restart 1 of 3 in 1.5 s"
    assert health.words(13.0) == "restart 1 of 3 in 0.0 s"
    fed(health, Wanted(), now=13.0)
    assert health.words(13.0) == ""


def test_one_that_is_held_down_ends_and_is_started_again_at_once_and_neither_counts() -> None:
    health = EngineHealth(restarts_max=0)
    for _ in range(5):
        fed(health, Wanted(), Ready())
        assert fed(health, HeldDown(), Died("killed"), Wanted()) == ()
        assert fed(health, LetUp()) == (Start(),)
    assert health.restarts == 0
    assert fed(health, Ready(), Died("by itself")) == (GiveUp("by itself"),)


def test_one_that_comes_up_although_it_was_held_down_is_ended_then() -> None:
    health = EngineHealth(restarts_max=0)
    fed(health, Wanted(), HeldDown())
    assert fed(health, Ready()) == (Watch(), End())
    assert fed(health, Died("killed")) == ()
    assert health.state is EngineState.HELD


def test_one_that_is_let_up_while_it_ends_is_started_as_soon_as_it_has() -> None:
    health = EngineHealth(restarts_max=0)
    assert fed(health, Wanted(), Ready(), HeldDown(), LetUp()) == ()
    assert fed(health, Died("killed")) == (Start(),)


def test_one_that_is_held_down_after_its_death_stays_dead_until_it_is_let_up() -> None:
    health = EngineHealth(restarts_max=3)
    fed(health, Wanted(), Ready(), Died("x"), HeldDown())
    assert fed(health, Wanted()) == ()
    assert health.state is EngineState.HELD
    fed(health, LetUp(), Ready(), Died("x"), HeldDown(), LetUp())
    assert fed(health, Wanted()) == (Start(),)
    assert health.restarts == 2


class AnyOrder(RuleBasedStateMachine):
    """Events in any order and number, sensible or not."""

    def __init__(self) -> None:
        super().__init__()
        self.restarts_max = 3
        self.health = EngineHealth(self.restarts_max)
        self.starts = self.ends = self.given_up = 0
        self.on_purpose = 0

    @rule(event=st.sampled_from(EVENTS))
    def step(self, event: HealthEvent) -> None:
        before = self.health.state
        ends_on_purpose = isinstance(event, Died) and self.health._ending
        self.ends += ends_on_purpose
        self.on_purpose += ends_on_purpose
        for action in self.health.step(event, 0.0):
            assert before is not EngineState.GAVE_UP
            match action:
                case Start():
                    assert self.starts == self.ends, "two incarnations at once"
                    self.starts += 1
                case GiveUp():
                    self.given_up += 1
                    self.ends += 1
                case After():
                    self.ends += 1

    @invariant()
    def bounded(self) -> None:
        assert self.starts <= self.restarts_max + 1 + self.on_purpose
        assert self.health.restarts <= self.restarts_max
        assert self.given_up <= 1
        assert (self.health.state is EngineState.GAVE_UP) == (self.given_up == 1)


TestAnyOrder = AnyOrder.TestCase
