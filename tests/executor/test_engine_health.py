"""An engine's lives: the state table of the docstring, and any order of events whatever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rose.driver.core import After
from rose_executor.engine_health import (
    Died,
    EngineHealth,
    EngineState,
    GiveUp,
    HealthAction,
    HealthEvent,
    Ready,
    Start,
    Wanted,
    Watch,
)


def fed(health: EngineHealth, *events: HealthEvent) -> tuple[HealthAction, ...]:
    """The actions of the last event."""
    actions: tuple[HealthAction, ...] = ()
    for event in events:
        actions = health.step(event, 0.0)
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
    EngineState.GAVE_UP: (Wanted(), Died("x"), Wanted(), Died("x")),
}
MOVES = {
    (EngineState.IDLE, Wanted()): (EngineState.STARTING, Start),
    (EngineState.WAITING, Wanted()): (EngineState.STARTING, Start),
    (EngineState.STARTING, Ready()): (EngineState.READY, Watch),
    (EngineState.STARTING, Died("x")): (EngineState.WAITING, After),
    (EngineState.READY, Died("x")): (EngineState.WAITING, After),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(EngineState, (Wanted(), Ready(), Died("x")))))
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
        assert delay_s(fed(health, Wanted(), Ready(), Died("killed"))) == 0.0
    assert fed(health, Wanted(), Ready(), Died("the third")) == (GiveUp("the third"),)
    assert health.restarts == 2


def test_no_restart_at_all_can_be_asked_for() -> None:
    assert fed(EngineHealth(restarts_max=0), Wanted(), Died("x")) == (GiveUp("x"),)


def test_failing_starts_are_spaced_out_and_a_ready_one_begins_anew() -> None:
    health = EngineHealth(restarts_max=100, backoff_s=1.0, backoff_max_s=5.0)
    assert [delay_s(fed(health, Wanted(), Died("x"))) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert delay_s(fed(health, Wanted(), Ready(), Died("x"))) == 0.0
    assert delay_s(fed(health, Wanted(), Died("x"))) == 1.0


class AnyOrder(RuleBasedStateMachine):
    """Events in any order and number, sensible or not."""

    def __init__(self) -> None:
        super().__init__()
        self.restarts_max = 3
        self.health = EngineHealth(self.restarts_max)
        self.starts = self.ends = self.given_up = 0
        self.timers = 0

    @rule(event=st.sampled_from([Wanted(), Ready(), Died("x")]))
    def step(self, event: HealthEvent) -> None:
        before = self.health.state
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
        assert self.starts <= self.restarts_max + 1
        assert self.given_up <= 1
        assert (self.health.state is EngineState.GAVE_UP) == (self.given_up == 1)


TestAnyOrder = AnyOrder.TestCase
