"""How many requests a guest may be given, and figures that begin again with each of its lives."""

from __future__ import annotations

from rose.slo import Slo
from rose_executor.board_states import GuestState, Reading, ServingState
from rose_executor.guest_presence import Presence
from rose_executor.guest_rules import OBEY_S, Freeze, GuestRules, Looked
from rose_executor.kv_budget import FixedBlocks
from rose_executor.lending import SHUT_S, Lent, lent
from rose_executor.meters import Growth, OpenSeconds, Share
from rose_executor.slack import SlackPolicy

POLICY = SlackPolicy(Slo(ttft_s=0.4, tpot_s=0.05), tokens_max=256, seqs_max=64)
NO_GUEST: Reading[GuestState] = Reading(None, why="the guest half was never written")


class World:
    """Rules that look every 5 ms at a serving engine which is idle, or busy up to its SLO, or not to be seen."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.rules = GuestRules(POLICY, FixedBlocks(77))
        self.seen: Looked | None = None
        self.trouble = ""
        self.stopped: tuple[int, ...] = ()

    def look(self, serving: str, seconds: float, guest: Reading[GuestState] = NO_GUEST) -> Lent:
        for _ in range(round(seconds / 0.005)):
            self.now_s += 0.005
            self.seen = Looked(self._serving(serving), guest)
            self.rules.step(self.seen, self.now_s)
        return self.lent()

    def lent(self, slots_max: int = 16) -> Lent:
        return lent(self.seen, self.trouble, self.rules, self.stopped, slots_max, self.now_s)

    def _serving(self, serving: str) -> Reading[ServingState]:
        if serving == "unknown":
            return Reading(None, why="the serving half is 9.0 s old")
        running, step_s = {"idle": (0, 0.01), "busy": (5, 0.06)}[serving]
        state = ServingState(
            steps=9, running=running, decoding=running, stepped_at_s=self.now_s, next_step_s=step_s, kv_blocks_total=100
        )
        return Reading(state, 1)


def test_nothing_is_lent_before_the_first_look() -> None:
    assert World().lent() == Lent(0, "nobody has looked at the board yet")


def test_beside_an_idle_engine_everything_is_lent() -> None:
    world = World()
    assert world.look("idle", 1.0) == Lent(8, "")  # nothing is known of its steps: it begins with a few
    assert world.lent(slots_max=5) == Lent(5, "")
    works = Reading(GuestState(computed_steps=9, running=3, allowed_tokens=60, allowed_seqs=12), 1)
    assert world.look("idle", 0.1, works) == Lent(12, "")
    assert world.look("idle", 0.1) == Lent(12, "")  # without work it says nothing


def test_a_gate_that_is_shut_for_a_moment_takes_nothing_back() -> None:
    world = World()
    world.look("idle", 1.0)
    assert world.look("busy", SHUT_S - 0.02) == Lent(8, "")
    assert world.look("busy", 0.04) == Lent(0, "serving leaves no slack, for 1 s now")
    assert world.look("busy", 8.0) == Lent(0, "serving leaves no slack, for 9 s now")
    assert world.look("idle", 0.01).slots > 0


def test_a_serving_engine_that_is_not_seen_gets_no_guest_at_once() -> None:
    world = World()
    world.look("idle", 1.0)
    assert world.look("unknown", 0.005) == Lent(0, "the serving engine cannot be seen: the serving half is 9.0 s old")


def test_trouble_with_the_board_comes_before_all() -> None:
    world = World()
    world.look("idle", 1.0)
    world.trouble = "cannot open the board"
    assert world.lent() == Lent(0, "cannot open the board")


def test_a_frozen_guest_gets_nothing_until_it_is_replaced() -> None:
    world = World()
    for computed in range(2000):
        guest = GuestState(steps=99, computed_steps=computed, running=3)
        world.look("busy", 0.005, Reading(guest, 1))
    assert world.rules.frozen
    assert (
        world.look("idle", 0.1).why == f"the guest is frozen: it went on computing {OBEY_S:g} s after its gate was shut"
    )
    world.rules.replaced()
    assert world.lent().slots > 0


def test_a_guest_that_somebody_has_stopped_gets_nothing_until_it_goes_on() -> None:
    world = World()
    world.look("idle", 1.0)
    world.stopped = (17, 19)
    assert world.lent() == Lent(
        0, "the guest stands still: somebody has stopped or traces process 17, 19; SIGCONT ends a stop"
    )
    world.stopped = ()
    assert world.lent() == Lent(8, "")


def test_a_guest_asleep_or_gone_gets_nothing() -> None:
    world = World()
    world.look("idle", 1.0)
    for presence in (Presence.ASLEEP, Presence.GONE):
        world.rules.kv.presence = presence
        assert world.lent() == Lent(0, f"the guest is {presence.value}: there is no memory for it")
    world.rules.kv.presence = Presence.ACTIVE
    assert world.lent().slots > 0


def test_a_guest_that_is_being_replaced_is_not_frozen_again_at_once() -> None:
    world = World()
    world.look("busy", 2 * OBEY_S)
    world.rules.replaced()
    for computed in range(round(OBEY_S / 0.005) - 2):
        guest = Reading(GuestState(steps=99, computed_steps=computed, running=3), 1)
        world.now_s += 0.005
        assert not any(
            isinstance(one, Freeze) for one in world.rules.step(Looked(world._serving("busy"), guest), world.now_s)
        )


def test_growth_goes_on_over_a_new_beginning() -> None:
    growth = Growth()
    assert [growth.by(figure) for figure in (5, 5, 8, 2, 2, 9)] == [5, 0, 3, 2, 0, 7]


def test_a_share_is_of_the_last_second() -> None:
    share = Share()
    assert share.saw(1000.0, 10.0) == 0.0  # busy for long before: no news
    assert share.saw(1000.25, 10.5) == 0.5
    assert share.saw(1000.75, 11.0) == 0.75
    assert share.saw(1000.75, 11.5) == 0.5
    assert share.saw(1000.75, 12.0) == 0.0
    assert share.saw(1000.75, 12.5) == 0.0


def test_a_share_is_never_more_than_all() -> None:
    share = Share()
    share.saw(0.0, 10.0)
    assert share.saw(7.0, 10.5) == 1.0
    assert share.saw(7.0, 10.5) == 1.0


def test_a_share_survives_a_new_life() -> None:
    share = Share()
    share.saw(50.0, 10.0)
    assert share.saw(0.25, 10.5) == 0.5


def test_open_seconds_are_those_that_the_guest_says_also_over_its_lives() -> None:
    gate = OpenSeconds()
    assert gate.saw(7.0, True, 100.0) == 0.0  # of before
    assert gate.saw(7.5, True, 110.0) == 0.5  # its own admission gave it less than its gate
    assert gate.saw(7.5, False, 120.0) == 0.5
    assert gate.saw(0.25, True, 130.0) == 0.75  # the next one began at nought
    assert gate.saw(1.25, True, 131.0) == 1.75


def test_of_a_silent_guest_the_seconds_count_in_which_its_gate_stood_open() -> None:
    gate = OpenSeconds()
    assert gate.saw(None, False, 100.0) == 0.0
    assert gate.saw(None, True, 101.0) == 0.0
    assert gate.saw(None, True, 103.0) == 2.0
    assert gate.saw(None, False, 104.0) == 3.0
    assert gate.saw(None, False, 110.0) == 3.0
    assert gate.saw(90.0, True, 111.0) == 3.0  # what it says for the first time was counted, or is not known
    assert gate.saw(91.0, True, 112.0) == 4.0
    assert gate.saw(None, True, 113.0) == 5.0
