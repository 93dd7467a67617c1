"""Which turns run together where there is not enough KV memory for all trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from placement_tools import Story, all_of, only

from rose_scheduler.batching import Batching
from rose_scheduler.events import EndVerdict, Grant, LeaseOutcome, OverAnswered, PlacementAction

WAIT_S = 1000.0


def granted(actions: Sequence[PlacementAction]) -> list[str]:
    return [grant.lease_id for grant in all_of(Grant, actions)]


class Engine:
    """A story with one engine of so many tokens and slots; turns take a second, and so does whatever is between."""

    def __init__(self, tokens: int = 1000, slots: int = 8, token_s: float = 0.01) -> None:
        self.story = Story(beat_deadline_s=1e6, dead_after_s=1e7)
        self.story.offer(most=slots)
        self.tokens, self.token_s = tokens, token_s
        self.story.beat(tokens=tokens, token_s=token_s)

    def ask(self, lease: str, trajectory: str, context: int, group: str = "", **more: int) -> list[str]:
        asked = self.story.ask(lease, trajectory, group or trajectory, context=context, wait_s=WAIT_S, **more)  # type: ignore[arg-type]
        return granted(asked)

    def end(self, lease: str, tokens: int = 0) -> list[str]:
        self.story.now += 1.0
        return granted(self.story.end(lease, tokens=tokens))

    def leave(self, trajectory: str, context: int, group: str = "") -> None:
        """Have it take a turn, behind which so many tokens stay."""
        assert self.ask(f"made {trajectory}", trajectory, context, group) == [f"made {trajectory}"]
        assert self.end(f"made {trajectory}") == []

    def resident(self, trajectory: str) -> int:
        (engine,) = self.story.core.engines
        return engine.pool.resident(trajectory)


def test_whose_prefix_is_there_goes_before_whose_is_not() -> None:
    here = Engine(slots=1)
    here.leave("a", 300)
    here.ask("held", "x", 300)
    assert here.ask("b1", "b", 400) == here.ask("a2", "a", 310) == []
    assert here.end("held") == ["a2"]
    assert here.end("a2") == ["b1"]


def test_a_start_that_drives_nothing_out_begins_at_once() -> None:
    here = Engine()
    here.leave("a", 300)
    assert here.ask("x1", "x", 300) == ["x1"]
    assert here.ask("y1", "y", 400) == ["y1"]
    assert here.resident("a") == 300


def test_a_start_waits_where_turns_that_run_would_pay_more_than_it_is_worth() -> None:
    here = Engine()
    here.leave("a", 600)
    assert here.ask("x1", "x", 300) == ["x1"]
    assert (
        here.ask("y1", "y", 500) == []
    )  # 400 tokens would go, 4 s for one that runs: of a cycle of 1 s that is too much
    assert here.end("x1") == ["y1"]  # nobody pays for it now
    assert here.resident("a") == 500


def test_a_start_is_worth_more_where_trajectories_are_away_for_long() -> None:
    here = Engine()
    here.leave("a", 600)
    here.story.now += 100.0
    assert here.ask("a2", "a", 600) == ["a2"]
    assert here.end("a2") == []
    assert here.ask("x1", "x", 300) == ["x1"]
    assert here.ask("y1", "y", 500) == ["y1"]


def test_what_goes_anyway_before_its_own_prefix_counts_half() -> None:
    for context, starts in ((160, True), (170, False)):  # 83 tokens may go at full price, and 166 at half of it
        here = Engine(token_s=0.003)
        here.ask("made old", "old", 1, group="old")
        here.end("made old")
        here.leave("new", 700)
        assert here.ask("x1", "x", 299) == ["x1"]
        assert bool(here.ask("old 2", "other of old", context, group="old")) is starts


def test_a_trajectory_is_taken_to_become_as_long_as_others_are() -> None:
    here = Engine()
    here.leave("a", 600)
    assert here.ask("x1", "x", 100) == ["x1"]
    assert here.ask("y1", "y", 100) == []  # there are 300 tokens left, but it will want 600
    assert here.end("x1") == ["y1"]


def test_turns_that_run_fit_together_and_alone_any_runs() -> None:
    here = Engine(token_s=0.0)
    assert here.ask("a1", "a", 5000) == ["a1"]
    assert here.ask("b1", "b", 10) == []
    assert here.end("a1") == ["b1"]
    assert here.ask("c1", "c", 980) == ["c1"]
    assert here.ask("d1", "d", 20) == []


def test_an_evaluation_and_who_has_waited_long_enough_pay_nothing() -> None:
    here = Engine()
    here.leave("a", 600)
    assert here.ask("x1", "x", 300) == ["x1"]
    assert here.ask("e1", "e", 400, evaluation=True) == ["e1"]
    here = Engine()
    here.leave("a", 600)
    assert here.ask("x1", "x", 300) == ["x1"]
    assert here.ask("y1", "y", 500) == []
    here.story.now += WAIT_S / 2
    assert granted(here.story.beat(tokens=here.tokens, token_s=here.token_s)) == ["y1"]


def test_an_evaluation_goes_before_whose_prefix_is_there() -> None:
    here = Engine(slots=1)
    here.leave("a", 300)
    here.ask("held", "x", 300)
    assert here.ask("a2", "a", 310) == here.ask("e1", "e", 100, evaluation=True) == []
    assert here.end("held") == ["e1"]
    assert here.end("e1") == ["a2"]


def test_a_group_near_completion_goes_before_one_that_is_not() -> None:
    here = Engine(slots=1)
    for name in ("b1", "a1", "a2"):
        here.ask(f"made {name}", name, 10, group=name[0], size=4)
        here.end(f"made {name}")
    here.ask("held", "x", 10)
    here.ask("b", "b2", 900, group="b", size=4)
    here.ask("a", "a3", 20, group="a", size=4)
    assert only(OverAnswered, here.story.over("a1")).verdict is EndVerdict.ENDED
    assert here.end("held") == ["a"]
    assert only(OverAnswered, here.story.over("a1")).verdict is EndVerdict.DUPLICATE
    assert only(OverAnswered, here.story.over("nobody")).verdict is EndVerdict.UNKNOWN


def test_others_of_a_group_stand_behind_until_its_probe_has_told() -> None:
    here = Engine(slots=2)
    here.ask("held", "x", 10, group="probed")
    here.ask("a1", "a", 10, group="a")
    here.ask("a2", "aa", 10, group="a", turn=0)
    here.ask("p2", "xx", 10, group="probed", turn=0)
    assert here.end("held") == ["p2"]
    here = Engine(slots=2)
    here.ask("held", "x", 10, group="probed")
    here.ask("a1", "a", 10, group="a")
    here.ask("p2", "xx", 10, group="probed", turn=0)
    here.ask("a2", "aa", 10, group="a", turn=0)
    assert here.end("a1") == ["a2"]


def test_what_is_over_leaves_its_memory_to_others() -> None:
    here = Engine()
    here.leave("a", 600)
    assert here.ask("x1", "x", 300) == ["x1"]
    assert here.ask("y1", "y", 500) == []
    assert granted(here.story.over("a")) == ["y1"]
    assert here.end("x1") == here.end("y1") == []
    assert here.ask("a2", "a", 600) == ["a2"]  # it may have meant another; it is placed all the same


def test_a_turn_that_was_broken_off_leaves_nothing() -> None:
    here = Engine()
    here.ask("a1", "a", 600)
    here.story.end("a1", LeaseOutcome.CUT)
    assert here.resident("a") == 0


def test_a_new_version_leaves_nothing_of_the_old() -> None:
    here = Engine()
    here.leave("a", 600)
    here.ask("b1", "b", 100)
    here.story.beat(version=1, tokens=here.tokens, token_s=here.token_s)
    assert here.resident("a") == 0
    here.end("b1")
    assert here.resident("b") == 0  # it began under the old one


def test_a_moved_trajectory_has_its_prefix_in_one_place() -> None:
    here = Engine(slots=1)
    here.leave("a", 300)
    here.ask("held", "x", 10)
    here.story.offer("f", most=2)
    here.story.beat("f", tokens=1000, token_s=1e-4)
    grant = only(Grant, here.story.ask("a2", "a", "a", context=310, wait_s=WAIT_S))
    assert (grant.engine_id, grant.affine) == ("f", False)
    assert here.story.core.engines.live("e", "1").pool.resident("a") == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(("token_s", "moves"), [(0.001, True), (0.1, False)])
def test_a_prefix_is_left_where_computing_it_anew_is_quicker_than_waiting(token_s: float, moves: bool) -> None:
    here = Engine(slots=1)
    here.leave("a", 300)  # turns there take a second
    here.ask("held", "x", 10)
    here.story.offer("f", most=2)
    here.story.beat("f", tokens=1000, token_s=token_s)
    assert here.ask("a2", "a", 310) == (["a2"] if moves else [])


def test_who_waits_for_an_engine_that_shuts_or_dies_is_taken_by_another() -> None:
    for ending in ("shuts", "is gone"):
        here = Engine(slots=1)
        here.leave("a", 300)
        here.ask("held", "x", 10)
        here.story.offer("f", most=2)
        here.story.beat("f", tokens=1000, token_s=1.0)
        assert here.ask("a2", "a", 310) == []
        actions = here.story.beat(slots=0) if ending == "shuts" else here.story.gone()
        assert granted(actions) == ["a2"], ending


def test_an_idle_engine_takes_what_waits_for_a_busy_one_once_that_is_cheaper() -> None:
    here = Engine(slots=1)
    here.leave("a", 300)
    here.ask("held", "x", 10)
    assert here.ask("a2", "a", 310) == []
    here.story.offer("f", most=1)
    assert granted(here.story.beat("f", tokens=1000, token_s=0.1)) == []
    assert granted(here.story.beat("f", tokens=1000, token_s=0.001)) == ["a2"]


def test_batching_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a gain is 0 or more"):
        Batching(gain=-1.0)
    with pytest.raises(ValueError, match="share"):
        Batching(urgent_after=0.0)
