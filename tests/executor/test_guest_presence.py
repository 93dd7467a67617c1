"""Active, asleep or gone: the specification, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose_executor.guest_presence import Died, GuestPresence, Move, Presence, PresenceRules, Residue, Room, Up

RULES = PresenceRules(doze_s=5.0, settle_s=10.0)
NEED = 100


def room(budget_bytes: int, may_hold_bytes: int | None = None) -> Room:
    return Room(budget_bytes, NEED, may_hold_bytes)


ENOUGH, LITTLE = room(100), room(99)


class Executor:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.presence = GuestPresence(RULES, self.now_s)

    def look(self, look: Room, seconds: float = 0.5) -> list[Move]:
        moves: list[Move] = []
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            moves += self.presence.step(look, self.now_s)
        return moves

    def says(self, event: Residue | Up | Died) -> None:
        assert not self.presence.step(event, self.now_s)

    def asleep(self, residue_bytes: int | None = None) -> Executor:
        assert self.look(LITTLE, 10.0) == [Move.SLEEP]
        if residue_bytes is not None:
            self.says(Residue(residue_bytes))
        return self


def test_a_guest_with_room_for_a_request_stays_active() -> None:
    executor = Executor()
    assert executor.look(ENOUGH, 100.0) == []
    assert (executor.presence.state, executor.presence.why) == (Presence.ACTIVE, "")


def test_a_budget_below_one_requests_need_puts_it_to_sleep_when_that_lasts() -> None:
    executor = Executor()
    assert executor.look(LITTLE, 5.0) == []
    assert executor.look(LITTLE, 1.0) == [Move.SLEEP]
    assert executor.presence.why == "its budget is less than one request needs"


def test_a_short_cut_does_not() -> None:
    executor = Executor()
    for _ in range(10):
        assert executor.look(LITTLE, 4.0) == []
        assert executor.look(ENOUGH, 0.5) == []


def test_it_wakes_after_a_calm() -> None:
    executor = Executor().asleep()
    assert executor.look(LITTLE, 60.0) == []
    assert executor.look(ENOUGH, 10.0) == []
    assert executor.look(ENOUGH, 1.0) == [Move.WAKE]
    assert executor.presence.state is Presence.ACTIVE


def test_a_budget_that_swings_leaves_it_asleep() -> None:
    executor = Executor().asleep()
    for _ in range(10):
        assert executor.look(ENOUGH, 9.0) == []
        assert executor.look(LITTLE, 0.5) == []


def test_what_waking_took_is_added_to_the_calm_that_the_next_waking_needs() -> None:
    executor = Executor().asleep()
    executor.look(ENOUGH, 11.0)
    executor.look(ENOUGH, 3.0)
    executor.says(Up())
    assert executor.presence.wake_s == pytest.approx(3.0, abs=0.51)
    executor.asleep()
    assert executor.look(ENOUGH, 13.0) == []
    assert executor.look(ENOUGH, 2.0) == [Move.WAKE]


def test_its_first_start_is_measured_too_and_a_second_up_measures_nothing() -> None:
    executor = Executor()
    executor.look(ENOUGH, 4.0)
    executor.says(Up())
    executor.look(ENOUGH, 4.0)
    executor.says(Up())
    assert (executor.presence.start_s, executor.presence.wake_s) == (4.0, None)


def test_one_that_died_is_being_started_again() -> None:
    executor = Executor()
    executor.says(Up())
    executor.look(ENOUGH, 100.0)
    executor.says(Died())
    executor.look(ENOUGH, 7.0)
    executor.says(Up())
    assert executor.presence.start_s == 7.0


def test_a_residue_that_nobody_measured_ends_nothing() -> None:
    assert Executor().asleep().look(room(0, may_hold_bytes=0), 60.0) == []


def test_a_residue_is_measured_asleep_or_not_at_all() -> None:
    executor = Executor()
    executor.says(Residue(10))
    assert executor.presence.residue_bytes is None


def test_a_residue_that_is_too_large_ends_it_when_that_lasts() -> None:
    executor = Executor().asleep(residue_bytes=300)
    assert executor.look(room(0, may_hold_bytes=300), 60.0) == []
    assert executor.look(room(0, may_hold_bytes=299), 5.0) == []
    assert executor.look(room(0, may_hold_bytes=299), 1.0) == [Move.END]
    assert executor.presence.state is Presence.GONE


def test_it_comes_back_when_its_residue_and_a_request_fit_for_longer_than_a_start_takes() -> None:
    executor = Executor()
    executor.look(ENOUGH, 20.0)
    executor.says(Up())
    executor.asleep(residue_bytes=300)
    executor.look(room(0, may_hold_bytes=0), 6.0)
    assert executor.look(room(100, may_hold_bytes=399), 100.0) == []
    assert executor.look(room(100, may_hold_bytes=400), 30.0) == []
    assert executor.look(room(100, may_hold_bytes=400), 1.0) == [Move.START]


def test_an_active_guest_whose_residue_became_too_large_is_ended_as_well() -> None:
    executor = Executor().asleep(residue_bytes=300)
    executor.look(ENOUGH, 11.0)
    executor.says(Up())
    assert executor.look(room(100, may_hold_bytes=200), 6.0) == [Move.END]


rooms = st.builds(room, st.sampled_from([0, 99, 100, 500]), st.sampled_from([None, 0, 300, 1000]))
events = st.one_of(rooms, st.builds(Residue, st.sampled_from([0, 300, 900])), st.just(Up()), st.just(Died()))


@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.5, 4.0, 6.0, 20.0])), max_size=60))
def test_each_move_leads_from_where_it_is_and_nothing_is_done_twice(
    trace: list[tuple[Room | Residue | Up | Died, float]],
) -> None:
    presence, now_s = GuestPresence(RULES, 0.0), 0.0
    leads = {
        Move.SLEEP: ({Presence.ACTIVE}, Presence.ASLEEP),
        Move.WAKE: ({Presence.ASLEEP}, Presence.ACTIVE),
        Move.END: ({Presence.ACTIVE, Presence.ASLEEP}, Presence.GONE),
        Move.START: ({Presence.GONE}, Presence.ACTIVE),
    }
    for event, tick_s in trace:
        now_s += tick_s
        before = presence.state
        moves = presence.step(event, now_s)
        assert len(moves) <= 1
        for move in moves:
            assert before in leads[move][0]
            assert presence.state is leads[move][1]
        if not moves:
            assert presence.state is before
        assert (presence.why == "") == (presence.state is Presence.ACTIVE)
        assert presence.wake_s is None or presence.wake_s >= 0


def test_rules_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError):
        PresenceRules(doze_s=-1.0)
