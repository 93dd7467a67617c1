"""What the executor does about its guest: the specification, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rose.slo import Slo
from rose_executor.board import HEARTBEAT_S
from rose_executor.board_states import GuestState, Quota, Reading, ServingKv, ServingState
from rose_executor.guest_presence import Presence
from rose_executor.guest_rules import LOOK_S, OBEY_S, PATIENCE_S, STEPS_UNDER_WAY, Freeze, GuestRules, Looked, Write
from rose_executor.kv_budget import FixedBlocks, KvBudget
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.slack import SlackPolicy

POLICY = SlackPolicy(Slo(ttft_s=0.4, tpot_s=0.05), tokens_max=256, seqs_max=64, interference=0.5)
LATE = ServingState(steps=9, running=2, decoding=2, next_step_s=0.06, kv_blocks_total=100)
UNKNOWN: Reading[ServingState] = Reading(None, why="stale")
NO_GUEST: Reading[GuestState] = Reading(None, why="never written")
TICK_S = 0.005


def idle(now_s: float) -> Reading[ServingState]:
    return Reading(ServingState(steps=9, stepped_at_s=now_s, kv_blocks_total=100), 1)


def guest(computed_steps: int, allowed: tuple[int, int] = (0, 0)) -> Reading[GuestState]:
    state = GuestState(
        steps=99,
        computed_steps=computed_steps,
        quota_number=1,
        running=3,
        kv_blocks_total=100,
        allowed_tokens=allowed[0],
        allowed_seqs=allowed[1],
    )
    return Reading(state, 1)


class World:
    """Looks at fixed intervals; `rules` are the product's own."""

    def __init__(self) -> None:
        self.rules = GuestRules(POLICY, FixedBlocks(77), move_after_s=2.0)
        self.now_s = 100.0

    def look(self, serving: Reading[ServingState], guest: Reading[GuestState] = NO_GUEST) -> Sequence[Write | Freeze]:
        self.now_s += TICK_S
        return self.rules.step(Looked(serving, guest), self.now_s)

    def open_gate(self) -> Quota:
        self.look(UNKNOWN)
        (action,) = self.look(idle(self.now_s))
        assert isinstance(action, Write)
        assert action.quota.gate_open
        return action.quota


def test_a_guest_beside_an_engine_that_is_seen_gets_a_quota_with_all_that_it_asks_for_slack_by() -> None:
    assert World().open_gate() == Quota(77, 256, 64, True, ttft_s=0.4, tpot_s=0.05, interference=0.5, move_after_s=2.0)


def test_memory_follows_what_serving_holds_and_one_asleep_has_none_and_a_shut_gate() -> None:
    world = World()
    budget = KvBudget(KvPolicy(KvPool(pool_bytes=1000, serving_bytes=1000, guest_bytes=1000)))
    world.rules = GuestRules(POLICY, budget)
    told = Reading(GuestState(kv_blocks_total=100), 1)

    def written(used_bytes: int) -> Quota:
        world.now_s += 0.05
        holds = Reading(ServingKv(total_bytes=1000, resident_bytes=used_bytes), 1)
        (action,) = world.rules.step(Looked(idle(world.now_s), told, holds), world.now_s)
        assert isinstance(action, Write)
        return action.quota

    assert (written(300).kv_blocks, written(300).gate_open) == (50, True)
    assert written(500).kv_blocks == 25
    budget.presence = Presence.ASLEEP
    assert (written(300).kv_blocks, written(300).gate_open) == (0, False)


def test_the_first_thing_written_is_a_shut_gate() -> None:
    """An executor that has just come back knows nothing yet."""
    (first,) = World().look(UNKNOWN)
    assert isinstance(first, Write)
    assert not first.quota.gate_open


def test_serving_unknown_shuts_the_gate_at_that_very_look() -> None:
    world = World()
    world.open_gate()
    (action,) = world.look(UNKNOWN)
    assert isinstance(action, Write)
    assert not action.quota.gate_open


def test_a_moment_without_slack_is_left_to_the_guest_and_a_long_time_shuts_the_gate() -> None:
    world = World()
    world.open_gate()
    opened = []
    for tick in range(400):
        late = Reading(LATE, 1) if tick % 40 or tick > 200 else idle(world.now_s)
        world.look(late)
        assert world.rules.quota is not None
        opened.append(world.rules.quota.gate_open)
    assert all(opened[: 200 + round(PATIENCE_S / TICK_S)])
    assert not any(opened[202 + round(PATIENCE_S / TICK_S) :])
    assert world.rules.slack_s == 0.0
    world.look(idle(world.now_s))
    assert world.rules.quota is not None
    assert world.rules.quota.gate_open
    assert world.rules.tight_since_s is None


def test_an_unchanged_quota_is_renewed_before_it_can_be_stale_and_not_at_every_look() -> None:
    world = World()
    world.open_gate()
    written_at = [world.now_s for _ in range(200) if world.look(idle(world.now_s))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(written_at)]
    assert max(gaps) + LOOK_S <= 0.06
    assert max(gaps) <= HEARTBEAT_S
    assert min(gaps) > 3 * TICK_S


def test_how_many_may_run_is_what_the_guest_said_when_it_had_work() -> None:
    world = World()
    world.open_gate()
    assert world.rules.seqs_allowed == 8  # nothing is known of its steps
    world.look(idle(world.now_s), guest(3, allowed=(40, 40)))
    assert world.rules.seqs_allowed == 40
    world.look(idle(world.now_s), guest(4))  # nothing allowed just now
    world.look(idle(world.now_s), NO_GUEST)
    assert world.rules.seqs_allowed == 40


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
