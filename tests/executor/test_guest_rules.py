"""What the executor does about its guest: the specification, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from rose.slo import Slo
from rose_executor.board import HEARTBEAT_S
from rose_executor.board_states import GuestState, Quota, Reading, ServingState
from rose_executor.guest_rules import IDLE_LOOK_S, LOOK_S, OBEY_S, STEPS_UNDER_WAY, Freeze, GuestRules, Looked, Write
from rose_executor.slack import SlackPolicy
from rose_executor.step_profile import StepProfile
from rose_executor.step_shape import StepShape

POLICY = SlackPolicy(Slo(ttft_s=0.4, tpot_s=0.05), tokens_max=256, seqs_max=64)
BUSY = ServingState(9, 2, 0, 0.0, 0.0, 0.06, 10, 5, 100, 0.0)
UNKNOWN: Reading[ServingState] = Reading(None, why="stale")
NO_GUEST: Reading[GuestState] = Reading(None, why="never written")
TICK_S = 0.005


def idle(now_s: float) -> Reading[ServingState]:
    return Reading(ServingState(9, 0, 0, 0.0, now_s, 0.01, 0, 0, 100, 0.0), 1)


def guest(computed_steps: int, step_s: float = 0.001, step_tokens: int = 10) -> Reading[GuestState]:
    return Reading(GuestState(99, computed_steps, 1, 3, 0, 9, 100, step_s, step_tokens, 0, 0.0, 0, 0.0), 1)


class World:
    """Looks at fixed intervals; `rules` are the product's own."""

    def __init__(self) -> None:
        self.rules = GuestRules(POLICY, kv_blocks=77)
        self.now_s = 100.0

    def look(self, serving: Reading[ServingState], guest: Reading[GuestState] = NO_GUEST) -> Sequence[Write | Freeze]:
        self.now_s += TICK_S
        return self.rules.step(Looked(serving, guest), self.now_s)

    def open_gate(self) -> Quota:
        quotas = [
            action.quota for _ in range(100) for action in self.look(idle(self.now_s)) if isinstance(action, Write)
        ]
        assert quotas[-1].gate_open
        return quotas[-1]


def test_a_guest_beside_an_idle_engine_gets_a_quota() -> None:
    quota = World().open_gate()
    assert (quota.kv_blocks, quota.active_seqs) == (77, quota.tokens_per_step)


def test_the_first_thing_written_is_a_shut_gate() -> None:
    """An executor that has just come back knows nothing yet."""
    (first,) = World().look(UNKNOWN)
    assert isinstance(first, Write)
    assert (first.quota.gate_open, first.quota.tokens_per_step, first.quota.kv_blocks) == (False, 0, 77)


@pytest.mark.parametrize("serving", [UNKNOWN, Reading(BUSY, 1)], ids=["unknown", "late"])
def test_the_gate_shuts_at_the_very_look_at_which_slack_is_gone(serving: Reading[ServingState]) -> None:
    world = World()
    world.open_gate()
    (action,) = world.look(serving)
    assert isinstance(action, Write)
    assert not action.quota.gate_open


def test_a_guest_that_may_compute_is_looked_at_more_often() -> None:
    world = World()
    waits = GuestState(99, 1, 1, 0, 1, 9, 100, 0.001, 10, 0, 0.0, 0, 0.0)
    done = GuestState(99, 1, 1, 0, 0, 0, 100, 0.001, 10, 0, 0.0, 0, 0.0)
    world.look(UNKNOWN, guest(1))
    assert world.rules.look_again_s == IDLE_LOOK_S
    world.open_gate()
    for now, look_again_s in (
        (guest(1), LOOK_S),
        (Reading(waits, 1), LOOK_S),
        (Reading(done, 1), IDLE_LOOK_S),
        (NO_GUEST, IDLE_LOOK_S),
    ):
        world.look(idle(world.now_s), now)
        assert world.rules.look_again_s == look_again_s


def test_where_it_is_looked_at_less_often_the_quota_is_renewed_in_time_all_the_same() -> None:
    world = World()
    world.open_gate()
    written_at = []
    for _ in range(100):
        world.now_s += world.rules.look_again_s - TICK_S
        if world.look(idle(world.now_s)):
            written_at.append(world.now_s)
    assert max(later - earlier for earlier, later in itertools.pairwise(written_at)) <= HEARTBEAT_S


def test_an_unchanged_quota_is_renewed_before_it_can_be_stale_and_not_at_every_look() -> None:
    world = World()
    world.open_gate()
    written_at = [world.now_s for _ in range(200) if world.look(idle(world.now_s))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(written_at)]
    assert max(gaps) <= 0.05 + 1e-9
    assert min(gaps) > 3 * TICK_S


@pytest.mark.parametrize("looks", [1, 3])
def test_what_the_guests_steps_cost_is_learnt_and_each_step_is_counted_once(looks: int) -> None:
    world, once = World(), StepProfile()
    for step in range(1, 60):
        step_s = 0.05 if step < 50 else 0.1
        once.saw(StepShape(5), step_s, 0.0)
        for _ in range(looks):
            world.look(UNKNOWN, guest(step, step_s=step_s, step_tokens=5))
    assert world.rules.profile.seconds(StepShape(5)) == once.seconds(StepShape(5)) > 0.05


def test_a_guest_whose_steps_cost_more_than_the_slack_gets_none() -> None:
    world = World()
    world.open_gate()
    for step in range(1, 60):
        actions = world.look(idle(world.now_s), guest(step, step_s=0.5, step_tokens=1))
    assert [action for action in actions if isinstance(action, Write) and action.quota.gate_open] == []
    assert world.rules.admission.slack_s == pytest.approx(0.1)


def shut_for(world: World, seconds: float, reading: Reading[GuestState]) -> list[Freeze]:
    looks = round(seconds / TICK_S)
    return [action for _ in range(looks) for action in world.look(UNKNOWN, reading) if isinstance(action, Freeze)]


def test_a_guest_that_goes_on_behind_a_shut_gate_is_frozen_until_it_stops() -> None:
    world = World()
    world.open_gate()
    assert not shut_for(world, 2 * OBEY_S, guest(10))
    assert len(shut_for(world, OBEY_S, guest(11 + STEPS_UNDER_WAY))) == 1
    assert len(shut_for(world, OBEY_S, guest(12 + STEPS_UNDER_WAY))) == 1  # the brake did not hold
    assert not shut_for(world, 5, guest(12 + STEPS_UNDER_WAY))
    assert "after its gate was shut" in world.rules.frozen


def test_what_a_dead_guest_had_computed_excuses_nothing_of_the_next() -> None:
    world = World()
    world.open_gate()
    assert not shut_for(world, 2 * OBEY_S, guest(5000))
    world.rules.replaced()
    assert not shut_for(world, 2 * OBEY_S, guest(5000))  # the board still says so for a while
    assert not shut_for(world, OBEY_S, guest(0))
    assert len(shut_for(world, OBEY_S, guest(1 + STEPS_UNDER_WAY))) == 1


def test_a_step_that_was_under_way_when_the_gate_was_shut_may_end_whenever_it_gets_to() -> None:
    """Below a busy serving engine a guest gets next to no processor time: that is no disobedience."""
    world = World()
    world.open_gate()
    assert not shut_for(world, 20 * OBEY_S, guest(10))
    assert not shut_for(world, 20 * OBEY_S, guest(11))
    assert not shut_for(world, OBEY_S, guest(10 + STEPS_UNDER_WAY))
    assert world.rules.frozen == ""
    world.open_gate()
    assert not shut_for(world, 20 * OBEY_S, guest(90))  # another shutting excuses as many again
    assert not shut_for(world, OBEY_S, guest(90 + STEPS_UNDER_WAY))
    assert len(shut_for(world, OBEY_S, guest(91 + STEPS_UNDER_WAY))) == 1


def test_a_guest_that_stops_in_time_is_not_frozen_whatever_it_did_before() -> None:
    world = World()
    world.open_gate()
    for computed in range(10, 20):
        assert not shut_for(world, OBEY_S / 20, guest(computed))
    assert not shut_for(world, 5, guest(20))
    assert not shut_for(world, 5, NO_GUEST)
    world.open_gate()
    for computed in range(30, 40):
        assert not shut_for(world, OBEY_S / 20, guest(computed))
    assert world.rules.frozen == ""
