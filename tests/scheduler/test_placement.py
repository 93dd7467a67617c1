"""The placement core: events in, actions out, at times that are said."""

from __future__ import annotations

import pytest
from placement_tools import Story, all_of, only

from rose.driver.core import After
from rose_scheduler.events import (
    Cancelled,
    EndAnswered,
    EndVerdict,
    EngineAnswered,
    Expire,
    Grant,
    Health,
    HealthChanged,
    Lapse,
    LeaseOutcome,
    Reason,
    Refuse,
    Standing,
    Tick,
)


def granted_to(actions: tuple[object, ...]) -> str:
    return only(Grant, actions).engine_id


def test_a_turn_goes_to_an_engine_that_beats_with_a_token_and_a_term() -> None:
    story = Story()
    assert only(EngineAnswered, story.offer()).standing is Standing.KNOWN
    assert story.ask("a") == ()
    (health, grant) = story.beat()[1:]
    assert isinstance(health, HealthChanged)
    assert (health.health, health.why) == (Health.HEALTHY, "was starting, and beats")
    assert grant == Grant(
        "a", "t-a", "e", "1", "at-e", 0, story.now + 60.0, False, "token a", keep_rank=grant.keep_rank
    )
    assert only(EndAnswered, story.end("a")).verdict is EndVerdict.ENDED


def test_a_group_that_opened_earlier_says_so_in_each_of_its_grants() -> None:
    story = Story()
    story.join(most=8)
    orders = [only(Grant, story.ask(f"l{at}", f"t{at}", group)).keep_rank for at, group in enumerate("abab")]
    assert orders[0] < orders[1]
    assert orders[:2] == orders[2:]


def test_the_next_turn_goes_where_the_prefix_lies_even_if_another_engine_is_less_loaded() -> None:
    story = Story()
    story.join("e", most=4)
    first = only(Grant, story.ask("a", "t"))
    assert (first.engine_id, first.affine) == ("e", False)
    story.join("f", most=4)
    story.end("a")
    for lease in ("x", "y", "z"):  # f takes two of them, e one
        story.ask(lease)
    assert [len(engine.leases) for engine in story.core.engines] == [2, 1]
    second = only(Grant, story.ask("b", "t", turn=2))
    assert (second.engine_id, second.affine) == ("e", True)


@pytest.mark.parametrize("spoil", ["full", "stale", "version", "incarnation", "failed", "closed"])
def test_a_prefix_counts_for_nothing_if_its_engine(spoil: str) -> None:
    story = Story(beat_deadline_s=3.0)
    story.join("e", most=1)
    story.ask("a", "t")
    story.end("a", LeaseOutcome.FAILED if spoil == "failed" else LeaseOutcome.DONE)
    if spoil == "stale":
        story.later(3.0)
    story.join("f", most=1)
    match spoil:
        case "full":
            story.ask("x", "u")
            assert next(iter(story.core.engines)).leases == {"x"}
        case "version":
            story.beat("e", version=1)
        case "incarnation":
            story.offer("e", "2", most=1)
            story.beat("e", "2", kv=0.9)
        case "failed":
            story.beat("e", kv=0.9)
        case "closed":
            story.beat("e", slots=0)
    grant = only(Grant, story.ask("b", "t", turn=2))
    assert not grant.affine
    assert grant.engine_id == ("e" if spoil == "version" else "f")


def test_the_least_loaded_share_of_slots_is_taken_then_the_least_memory() -> None:
    story = Story()
    story.offer("big", most=4)
    story.offer("small", most=2)
    story.beat("big", kv=0.5)
    story.beat("small", kv=0.1)
    assert [granted_to(story.ask(lease)) for lease in "abcdef"] == ["small", "big", "big", "small", "big", "big"]
    assert story.ask("g") == ()


def test_a_lent_engine_comes_before_one_of_the_runs_own_while_it_has_room_but_not_before_the_prefix() -> None:
    story = Story()
    story.offer("own", most=4)
    story.beat("own")
    assert granted_to(story.ask("a", "t")) == "own"
    story.end("a")
    story.offer("lent", most=2, kind="lent")
    story.beat("lent", kv=0.9)
    assert granted_to(story.ask("b", "t", turn=2)) == "own"
    assert [granted_to(story.ask(lease)) for lease in "cdef"] == ["lent", "lent", "own", "own"]
    story.end("c")
    assert granted_to(story.ask("g")) == "lent"


def test_a_lent_engine_takes_what_its_executor_allows_and_nothing_when_closed() -> None:
    story = Story()
    story.offer("lent", most=8, kind="lent")
    story.beat("lent", slots=1)
    assert granted_to(story.ask("a")) == "lent"
    assert story.ask("b") == ()
    story.beat("lent", slots=0)
    story.end("a")
    assert story.core.leases.find("b") is not None
    assert all_of(Grant, story.beat("lent", slots=0)) == []
    assert granted_to(story.beat("lent", slots=2)) == "lent"


def test_fewer_slots_than_leases_end_nothing_and_grant_nothing() -> None:
    story = Story()
    story.join(most=4)
    for lease in "abcd":
        story.ask(lease)
    story.ask("e")
    assert all_of(Grant, story.beat(slots=2)) == []
    assert [len(all_of(Grant, story.end(lease))) for lease in "abc"] == [0, 0, 1]


def test_only_an_engine_of_the_version_that_was_asked_for_gets_traffic() -> None:
    story = Story()
    story.join("old", version=6)
    assert story.ask("a", version=7) == ()
    assert granted_to(story.ask("b", version=6)) == "old"
    story.join("new", version=7)
    assert story.core.leases.find("a").grant.engine_id == "new"  # type: ignore[union-attr]


def test_a_lease_that_no_engine_can_take_holds_up_none_behind_it() -> None:
    story = Story()
    story.join(most=1)
    story.ask("running")
    story.ask("ahead", version=9)
    story.ask("behind")
    assert only(Grant, story.end("running")).lease_id == "behind"


def test_a_lease_gets_no_incarnation_that_it_avoids_and_holds_up_none_behind_it() -> None:
    story = Story()
    story.offer("lent", "bad", most=8, kind="lent")
    story.beat("lent", "bad")
    assert granted_to(story.ask("a", "t")) == "lent"
    story.end("a")
    assert story.ask("b", "t", turn=2, avoid=("bad",)) == ()
    why = story.core.why("b", story.now)
    assert why is not None
    assert "1 that this turn was lost on" in why.waits_for
    assert granted_to(story.ask("c")) == "lent"
    assert all_of(Grant, story.beat("lent", "bad")) == []
    story.join("own", most=1)
    grant = story.core.leases.find("b").grant  # type: ignore[union-attr]
    assert grant is not None
    assert (grant.engine_id, grant.affine) == ("own", False)
    # Its next incarnation is another engine.
    story.ask("d", "u", avoid=("bad",))
    story.offer("lent", "good", most=8, kind="lent")
    assert granted_to(story.beat("lent", "good")) == "lent"


def test_open_groups_finish_before_new_ones_start() -> None:
    story = Story()
    story.join(most=1)
    story.ask("1", group="first")
    story.ask("2", group="second")
    story.ask("3", group="third")
    story.ask("1b", group="first")
    order = []
    lease = "1"
    for _ in range(3):
        lease = only(Grant, story.end(lease)).lease_id
        order.append(lease)
    assert order == ["1b", "2", "3"]


def test_a_group_that_opens_while_others_of_it_wait_takes_them_along() -> None:
    story = Story()
    story.join("old", most=1, version=0)
    story.ask("running", group="zero")
    for lease, group, version in (("a1", "a", 0), ("b1", "b", 0), ("b2", "b", 0), ("b3", "b", 1)):
        story.ask(lease, group=group, version=version)
    story.offer("new", most=1, version=1)
    assert only(Grant, story.beat("new", version=1)).lease_id == "a1"
    story.later(1.0)
    story.beat("old"), story.beat("new", version=1)
    story.ask("a2", group="a")
    assert only(Grant, story.end("running")).lease_id == "a2"  # a is open, b is not
    assert only(Grant, story.end("a1")).lease_id == "b1"
    assert only(Grant, story.end("a2")).lease_id == "b2"
    story.ask("c1", group="c")
    story.ask("b4", group="b")
    assert [only(Grant, story.end(lease)).lease_id for lease in ("b1", "b2", "b3")] == ["b3", "b4", "c1"]


def test_who_has_waited_for_half_his_time_comes_before_all_groups() -> None:
    story = Story(beat_deadline_s=90.0, dead_after_s=100.0)
    story.join(most=1)
    story.ask("held", group="open")
    story.ask("new", group="new", wait_s=10.0)
    story.ask("newer", group="newer", wait_s=60.0)
    story.now += 4.9
    story.ask("1", group="open")
    assert only(Grant, story.end("held")).lease_id == "1"
    story.ask("2", group="open")
    story.ask("newest", group="newest", wait_s=0.2)
    story.later(0.1)  # `new` is urgent, `newest` is too and asked later
    assert only(Grant, story.end("1")).lease_id == "new"
    story.ask("3", group="new")
    assert only(Grant, story.end("new")).lease_id == "newest"
    assert [only(Grant, story.end(lease)).lease_id for lease in ("newest", "2", "3")] == ["2", "3", "newer"]


def test_an_urgent_lease_stays_so_when_its_group_opens() -> None:
    story = Story(beat_deadline_s=90.0, dead_after_s=100.0)
    story.join("old", most=1)
    story.ask("held", group="open")
    story.ask("a1", group="a", wait_s=10.0)
    story.ask("a2", group="a", wait_s=10.0)
    story.later(5.0)
    story.ask("o", group="open")
    story.offer("new", most=1)
    assert only(Grant, story.beat("new")).lease_id == "a1"
    assert only(Grant, story.end("held")).lease_id == "a2"


def test_a_lease_expires_at_its_deadline_and_says_what_was_missing() -> None:
    story = Story(beat_deadline_s=30.0, dead_after_s=60.0)
    story.ask("none", wait_s=1.0)
    assert "none is offered" in only(Expire, story.later(1.0)).what
    story.join("e", most=1, version=3)
    story.offer("f", version=3)
    story.ask("x")
    story.ask("new", version=4, wait_s=1.0)
    story.ask("full", version=3, wait_s=2.0)
    lapsed = only(Expire, story.later(1.0))
    assert (lapsed.lease_id, lapsed.lapse) == ("new", Lapse.NOT_PLACED)
    assert lapsed.what == (
        "after 1.0 s it still waited for an engine of version 4 or newer with room: 1 at version 3, 1 starting;"
        " 0 ahead of it in line"
    )
    assert "1 full, 1 starting" in only(Expire, story.later(1.0)).what
    assert len(story.core.line) == 0


def test_nothing_is_granted_after_its_deadline_even_where_time_has_leapt() -> None:
    story = Story(beat_deadline_s=90.0, dead_after_s=100.0)
    story.join(most=1)
    story.ask("held", hold_s=1.0)
    story.ask("waits", wait_s=2.0)
    story.ask("longer", wait_s=50.0)
    actions = story.later(10.0)
    assert {(one.lease_id, one.lapse) for one in all_of(Expire, actions)} == {
        ("held", Lapse.NOT_ENDED),
        ("waits", Lapse.NOT_PLACED),
    }
    assert only(Grant, actions).lease_id == "longer"


def test_who_does_not_wait_gets_what_there_is_at_once_or_nothing() -> None:
    story = Story()
    story.join(most=1)
    assert only(Grant, story.ask("a", wait_s=0.0)).lease_id == "a"
    lapsed = only(Expire, story.ask("b", wait_s=0.0))
    assert (lapsed.lapse, lapsed.what) == (
        Lapse.NOT_PLACED,
        "it did not wait for an engine of version 0 or newer with room: 1 full",
    )
    assert only(Refuse, story.ask("b")).reason is Reason.ENDED


def test_a_lease_that_is_held_too_long_frees_its_slot_and_its_end_is_late() -> None:
    story = Story(beat_deadline_s=90.0, dead_after_s=100.0)
    story.join(most=1)
    story.ask("a", hold_s=5.0)
    story.ask("b")
    actions = story.later(5.0)
    assert only(Expire, actions).lapse is Lapse.NOT_ENDED
    assert only(Grant, actions).lease_id == "b"
    assert story.end("a") == (EndAnswered("a", EndVerdict.LATE),)
    assert next(iter(story.core.engines)).leases == {"b"}


def test_an_end_counts_once_and_of_what_is_held() -> None:
    story = Story()
    story.join(most=1)
    story.ask("a")
    story.ask("b")
    assert story.end("b") == (EndAnswered("b", EndVerdict.UNKNOWN),)
    assert only(Grant, story.end("a")).lease_id == "b"
    assert story.end("a") == (EndAnswered("a", EndVerdict.DUPLICATE),)
    assert story.end("never") == (EndAnswered("never", EndVerdict.UNKNOWN),)
    assert next(iter(story.core.engines)).leases == {"b"}


def test_the_same_question_gets_the_same_answer_and_another_one_a_conflict() -> None:
    story = Story()
    story.join(most=1)
    grant = story.ask("a", "t")
    story.now += 1.0
    assert story.ask("a", "t") == grant
    assert story.ask("b", "u") == ()
    assert story.ask("b", "u") == ()
    assert only(Refuse, story.ask("a", "u")).reason is Reason.CONFLICT
    assert only(Refuse, story.ask("b", "u", turn=2)).reason is Reason.CONFLICT
    assert only(Refuse, story.ask("c", "t", group="other")).reason is Reason.CONFLICT
    story.end("a")
    assert only(Refuse, story.ask("a", "t")).reason is Reason.ENDED
    assert len(story.core.leases) == 1


def test_who_asks_no_longer_leaves_no_trace_and_may_ask_again() -> None:
    story = Story()
    story.ask("a")
    assert story.feed(Cancelled("a")) == ()
    assert (len(story.core.leases), len(story.core.line)) == (0, 0)
    story.join(most=1)
    assert only(Grant, story.ask("a")).lease_id == "a"
    story.ask("b")
    assert only(Grant, story.feed(Cancelled("a"))).lease_id == "b"
    assert only(Refuse, story.ask("a")).reason is Reason.ENDED
    assert story.feed(Cancelled("a")) == story.feed(Cancelled("never")) == ()


def test_a_full_line_refuses_and_says_when_to_come_again_but_takes_older_groups() -> None:
    story = Story(waiting=2, retry_after_s=0.5)
    story.join(most=1)
    story.ask("held", group="open")
    story.ask("n1", group="new 1")
    story.ask("n2", group="new 2")
    assert story.ask("n3", group="new 3") == (Refuse("n3", Reason.FULL, "2 leases wait already", 0.5),)
    refused = only(Refuse, story.ask("o1", group="open"))
    assert (refused.lease_id, refused.reason) == ("n2", Reason.FULL)
    assert only(Refuse, story.ask("o2", group="open")).lease_id == "n1"
    assert only(Refuse, story.ask("o3", group="open")).lease_id == "o3"
    assert only(Refuse, story.ask("n2", group="new 2")).reason is Reason.FULL
    assert only(Grant, story.end("held")).lease_id == "o1"


def test_a_silent_engine_is_stale_and_keeps_its_leases_then_dead_and_loses_them() -> None:
    story = Story(beat_deadline_s=3.0, dead_after_s=10.0)
    story.join(most=2)
    story.ask("a")
    changed = only(HealthChanged, story.later(3.0))
    assert (changed.health, changed.why) == (Health.STALE, "no beat for 3 s")
    assert story.ask("b", wait_s=60.0) == ()
    assert granted_to(story.beat()) == "e"
    story.later(3.0)
    actions = story.later(7.0)
    assert only(HealthChanged, actions).health is Health.DEAD
    assert [(one.lease_id, one.lapse) for one in all_of(Expire, actions)] == [
        ("a", Lapse.ENGINE_LOST),
        ("b", Lapse.ENGINE_LOST),
    ]
    assert only(EndAnswered, story.end("a")).verdict is EndVerdict.LATE
    assert only(EngineAnswered, story.beat()).standing is Standing.UNKNOWN
    story.offer()
    story.ask("c")
    assert granted_to(story.beat()) == "e"


def test_an_engine_that_never_beats_is_dead_in_the_end() -> None:
    story = Story(beat_deadline_s=3.0, dead_after_s=10.0)
    story.offer()
    assert story.later(9.9) == ()
    assert only(HealthChanged, story.later(0.1)).health is Health.DEAD
    assert len(story.core.engines) == 0


def test_a_new_incarnation_ends_the_old_one_which_never_comes_back() -> None:
    story = Story()
    story.join(most=1)
    story.ask("a")
    actions = story.offer(incarnation="2", most=1)
    assert only(Expire, actions).lapse is Lapse.ENGINE_LOST
    assert [one.health for one in all_of(HealthChanged, actions)] == [Health.DEAD, Health.STARTING]
    assert story.ask("b", "t-a", turn=2) == ()
    for late in (story.beat(incarnation="1"), story.offer(incarnation="1", most=1), story.gone(incarnation="1")):
        assert only(EngineAnswered, late).standing is Standing.OVER
    grant = only(Grant, story.beat(incarnation="2"))
    assert (grant.lease_id, grant.incarnation, grant.affine) == ("b", "2", False)


def test_an_address_belongs_to_the_engine_that_was_offered_there_last() -> None:
    story = Story()
    story.offer("e", address="here")
    story.offer("f", address="there")
    story.offer("f", "2", address="here")
    assert [(engine.engine_id, engine.incarnation) for engine in story.core.engines] == [("f", "2")]
    assert only(EngineAnswered, story.beat("e")).standing is Standing.OVER
    story.offer("e", "2", address="there")
    assert len(story.core.engines) == 2


def test_a_lent_engine_never_takes_the_place_of_one_of_the_run_s_own() -> None:
    story = Story()
    story.join(most=1)
    story.ask("a")
    assert (
        only(EngineAnswered, story.offer(incarnation="2", address="there", kind="lent")).standing is Standing.CONFLICT
    )
    assert only(EngineAnswered, story.beat()).standing is Standing.KNOWN
    assert next(iter(story.core.engines)).leases == {"a"}
    story.offer("f", kind="lent")
    assert only(EngineAnswered, story.offer("f", "2", kind="dedicated")).standing is Standing.KNOWN


def test_an_offer_may_be_repeated_but_not_changed() -> None:
    story = Story()
    story.join(most=2)
    story.ask("a")
    assert story.offer(most=2, version=5) == (EngineAnswered("e", "1", Standing.KNOWN),)
    assert only(EngineAnswered, story.offer(most=3)).standing is Standing.CONFLICT
    assert only(EngineAnswered, story.offer(most=2, counts="at-f")).standing is Standing.CONFLICT
    assert next(iter(story.core.engines)).leases == {"a"}


def test_the_number_of_engines_is_bounded_and_a_replaced_one_makes_room() -> None:
    story = Story(engines=2)
    story.offer("e"), story.offer("f")
    assert only(EngineAnswered, story.offer("g")).standing is Standing.FULL
    assert only(EngineAnswered, story.offer("f", "2")).standing is Standing.KNOWN
    assert only(EngineAnswered, story.gone("e")).standing is Standing.OVER
    assert only(EngineAnswered, story.offer("g")).standing is Standing.KNOWN


def test_an_engine_that_went_before_its_late_offer_arrived_stays_gone() -> None:
    story = Story()
    assert only(EngineAnswered, story.gone()).standing is Standing.OVER
    assert only(EngineAnswered, story.offer()).standing is Standing.OVER


def test_what_is_over_is_forgotten_at_last_and_a_trajectory_with_it() -> None:
    story = Story(trajectories=2, ended=2, engines=2)
    story.join(most=1)
    for number in range(5):
        story.ask(f"l{number}", group=f"g{number}")
        story.end(f"l{number}")
    assert story.core.why("t-l2", story.now) is None
    assert story.core.why("t-l3", story.now) is not None
    assert (len(story.core.trajectories), story.core.trajectories.groups) == (2, 2)
    assert only(EndAnswered, story.end("l2")).verdict is EndVerdict.UNKNOWN
    assert only(EndAnswered, story.end("l3")).verdict is EndVerdict.DUPLICATE
    for number in range(5):
        story.gone("other", f"{number}")
    assert only(EngineAnswered, story.beat("other", "2")).standing is Standing.UNKNOWN


def test_one_timer_is_out_for_the_earliest_deadline() -> None:
    story = Story(beat_deadline_s=3.0, dead_after_s=10.0)
    core = story.core

    def timers(event_actions: tuple[object, ...]) -> list[After[Tick]]:
        return all_of(After, event_actions)

    from rose_scheduler.events import EngineBeat, EngineKind, EngineOffered

    (first,) = timers(core.step(EngineOffered("e", "1", EngineKind.LENT, "at", 1, 0), 0.0))
    assert first == After(10.0, Tick(1))
    (second,) = timers(core.step(EngineBeat("e", "1", 0, 1, 0.0), 1.0))
    assert second == After(3.0, Tick(2))
    assert timers(core.step(EngineBeat("e", "1", 0, 1, 0.0), 3.5)) == []
    (third,) = timers(core.step(Tick(2), 4.0))
    assert third == After(2.5, Tick(3))
    (fourth,) = timers(core.step(Tick(3), 6.5))
    assert fourth.delay_s == 7.0
    assert timers(core.step(Tick(1), 10.0)) == []
    assert only(HealthChanged, core.step(fourth.event, 13.5)).health is Health.DEAD
    assert core.step(Tick(99), 50.0) == ()
