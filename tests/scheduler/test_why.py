"""The scheduler says what a trajectory waits for, since when, and what happened before."""

from __future__ import annotations

from placement_tools import Story

from rose_scheduler.trajectories import HISTORY_KEPT
from rose_scheduler.why import Stand, Why


def asked(story: Story, some_id: str) -> Why:
    why = story.core.why(some_id, story.now)
    assert why is not None
    return why


def test_a_trajectory_is_followed_from_turn_to_turn() -> None:
    story = Story(beat_deadline_s=30.0, dead_after_s=60.0)
    story.ask("a", "t", "g", wait_s=9.0)
    story.now += 2.0
    why = asked(story, "t")
    assert why == asked(story, "a")
    assert (why.stand, why.waits_for) == (Stand.WAITING, "an engine: none is offered; 0 ahead of it in line")
    assert (why.group_id, why.lease_id, why.for_s, why.left_s) == ("g", "a", 2.0, 7.0)
    story.join(most=1)
    story.now += 3.0
    why = asked(story, "t")
    assert (why.stand, why.waits_for) == (Stand.RUNNING, "the end of turn 1 on e")
    assert (why.for_s, why.left_s) == (3.0, 57.0)
    story.end("a")
    story.now += 1.0
    why = asked(story, "t")
    assert (why.stand, why.lease_id, why.for_s, why.left_s) == (Stand.BETWEEN, "", 1.0, None)
    assert [(one.what, one.engine_id) for one in why.history] == [
        ("asked for turn 1", ""),
        ("granted", "e"),
        ("done, 7 tokens", "e"),
    ]
    assert asked(story, "t").history[0].at_s == 100.0
    assert asked(story, "a") == why
    assert story.core.why("nobody", story.now) is None


def test_what_is_missing_is_counted_by_its_kind() -> None:
    story = Story(beat_deadline_s=3.0, dead_after_s=60.0)
    story.join("stale", version=7)
    story.later(3.0)
    for engine in ("full", "old", "older", "closed"):
        story.offer(engine, most=1, version=7)
    story.offer("starting")
    story.beat("full", version=7), story.beat("old", version=5), story.beat("older", version=5)
    story.beat("closed", version=7, slots=0)
    story.ask("x", version=7)
    story.ask("y", "t", version=7)
    story.ask("z", "u", version=7)
    assert asked(story, "u").waits_for == (
        "an engine of version 7 or newer with room: 2 at version 5, 1 closed, 1 full, 1 stale, 1 starting;"
        " 1 ahead of it in line"
    )


def test_only_the_last_happenings_are_kept() -> None:
    story = Story()
    story.join()
    for turn in range(20):
        story.ask(f"l{turn}", "t", turn=turn)
        story.end(f"l{turn}")
    history = asked(story, "t").history
    assert len(history) == HISTORY_KEPT
    assert history[-2].lease_id == history[-1].lease_id == "l19"


def test_who_waits_for_memory_is_told_which() -> None:
    story = Story(beat_deadline_s=1e6, dead_after_s=1e7)
    story.offer(most=8)
    story.beat(tokens=1000, token_s=0.01)
    story.ask("a", "a", "a", context=600)
    story.now += 1.0
    story.end("a", tokens=0)
    story.ask("x", "x", "x", context=300)
    story.ask("y", "y", "y", context=500)
    assert asked(story, "y").waits_for == (
        "an engine of version 0 or newer with room: 1 where a start now would cost those that run more than it is"
        " worth; 0 ahead of it in line"
    )
    story.ask("z", "z", "z", context=900)
    assert "1 whose memory is in use" in asked(story, "z").waits_for


def test_who_waits_for_the_engine_that_has_its_prefix_is_told_so() -> None:
    story = Story(beat_deadline_s=1e6, dead_after_s=1e7)
    story.offer(most=1)
    story.beat(tokens=1000, token_s=0.01)
    story.ask("a", "a", "a")
    story.now += 1.0
    story.end("a")
    story.ask("x", "x", "x")
    story.ask("a2", "a", "a")
    assert "; its prefix is on e, which is expected to be quicker" in asked(story, "a").waits_for
