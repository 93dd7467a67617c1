"""The version state: the state table of its docstring, and random news, late, repeated and wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.version_events import (
    Commit,
    CommitFailed,
    Committed,
    CommitUndone,
    EngineJoined,
    EngineLost,
    Pinned,
    Published,
    Replace,
    Retire,
    Stage,
    Staged,
    StageFailed,
    Unpinned,
    VersionAction,
    VersionEvent,
)
from rose.versions import EnginePhase, VersionState


class Story:
    """A state with short words for what happens to one engine, `e`."""

    def __init__(self, keep: int = 2, stage_attempts: int = 3) -> None:
        self.state = VersionState(keep, stage_attempts)

    def feed(self, event: VersionEvent) -> tuple[VersionAction, ...]:
        return self.state.step(event, 0.0)

    def publish(self, version: int) -> tuple[VersionAction, ...]:
        return self.feed(Published(version, f"hash {version}"))

    def join(self, version: int, incarnation: str = "1", engine: str = "e") -> tuple[VersionAction, ...]:
        return self.feed(EngineJoined(engine, incarnation, version))

    def reach(self, phase: EnginePhase) -> None:
        """Bring the engine, which runs 0, to `phase` with 1 published."""
        self.publish(0)
        self.join(0)
        if phase is EnginePhase.SERVING:
            return
        self.publish(1)
        if phase is EnginePhase.LAGGING:
            for order in (1, 2, 3):
                self.feed(StageFailed("e", 1, order, "disk"))
        if phase in (EnginePhase.COMMITTING, EnginePhase.POISONED):
            self.feed(Staged("e", 1, 1))
        if phase is EnginePhase.POISONED:
            self.feed(CommitFailed("e", 1, 2, "shard 1"))
        assert self.state.phase("e") is phase

    def engine(self) -> tuple[EnginePhase | None, int | None, bool]:
        return self.state.phase("e"), self.state.engine_version("e"), self.state.may_serve("e")


def test_an_engine_is_brought_to_a_new_version_by_stage_and_commit() -> None:
    story = Story()
    assert story.publish(0) == ()
    assert story.join(0) == ()
    assert story.engine() == (EnginePhase.SERVING, 0, True)
    assert story.publish(1) == (Stage("e", "1", 1, order=1),)
    assert story.engine() == (EnginePhase.STAGING, 0, True)
    assert story.feed(Staged("e", 1, order=1)) == (Commit("e", "1", 1, order=2),)
    assert story.engine() == (EnginePhase.COMMITTING, 0, False)
    assert story.feed(Committed("e", 1, order=2)) == ()
    assert story.engine() == (EnginePhase.SERVING, 1, True)


def test_an_engine_skips_versions_but_commits_what_it_has_staged() -> None:
    story = Story()
    story.reach(EnginePhase.STAGING)
    assert story.publish(2) == ()
    assert story.publish(3) == ()
    assert story.feed(Staged("e", 1, 1)) == (Commit("e", "1", 1, 2),)
    assert story.feed(Committed("e", 1, 2)) == (Stage("e", "1", 3, 3), Retire(0))


def test_an_engine_that_joins_behind_is_brought_up() -> None:
    story = Story()
    story.publish(0)
    story.publish(1)
    assert story.join(0) == (Stage("e", "1", 1, 1),)


def test_a_failed_stage_is_tried_again_then_the_engine_lags_and_serves_its_old_version() -> None:
    story = Story()
    story.reach(EnginePhase.STAGING)
    assert story.feed(StageFailed("e", 1, 1, "disk")) == (Stage("e", "1", 1, 2),)
    assert story.feed(StageFailed("e", 1, 2, "disk")) == (Stage("e", "1", 1, 3),)
    assert story.feed(StageFailed("e", 1, 3, "disk")) == ()
    assert story.engine() == (EnginePhase.LAGGING, 0, True)
    assert story.state.trouble() == {"e": "version 1 was refused 3 times: disk"}
    assert story.publish(2) == (Stage("e", "1", 2, 4),)
    assert story.state.trouble() == {}


def test_each_version_has_its_own_attempts() -> None:
    story = Story(stage_attempts=2)
    story.reach(EnginePhase.STAGING)
    story.feed(StageFailed("e", 1, 1, "disk"))
    story.publish(2)
    assert story.feed(StageFailed("e", 1, 2, "disk")) == (Stage("e", "1", 2, 3),)
    assert story.feed(StageFailed("e", 2, 3, "disk")) == (Stage("e", "1", 2, 4),)
    assert story.feed(StageFailed("e", 2, 4, "disk")) == ()
    assert story.state.phase("e") is EnginePhase.LAGGING


def test_a_commit_that_was_undone_is_tried_again_then_the_engine_lags_and_serves_its_old_version() -> None:
    story = Story()
    story.reach(EnginePhase.COMMITTING)
    order = 2
    for _ in range(2):
        assert story.feed(CommitUndone("e", 1, order, "tile 3")) == (Stage("e", "1", 1, order + 1),)
        assert story.engine() == (EnginePhase.STAGING, 0, True)
        assert story.feed(Staged("e", 1, order + 1)) == (Commit("e", "1", 1, order + 2),)
        order += 2
    assert story.feed(CommitUndone("e", 1, order, "tile 3")) == ()
    assert story.engine() == (EnginePhase.LAGGING, 0, True)
    assert story.state.trouble() == {"e": "version 1 was refused 3 times: tile 3"}
    assert story.publish(2) == (Stage("e", "1", 2, order + 1),)


def test_a_failed_commit_poisons_the_engine_until_a_new_incarnation_joins() -> None:
    story = Story()
    story.reach(EnginePhase.COMMITTING)
    why = "the commit of version 1 failed: shard 1"
    assert story.feed(CommitFailed("e", 1, 2, "shard 1")) == (Replace("e", "1", 1, why),)
    assert story.engine() == (EnginePhase.POISONED, None, False)
    assert story.state.trouble() == {"e": why}
    assert story.publish(2) == ()
    assert story.feed(Committed("e", 1, 2)) == ()
    assert story.join(1) == ()
    assert story.engine() == (EnginePhase.POISONED, None, False)
    assert story.feed(EngineLost("e", "1")) == (Retire(0),)
    assert story.engine() == (None, None, False)
    assert story.join(2, "2") == ()
    assert story.engine() == (EnginePhase.SERVING, 2, True)


def test_an_engine_that_loaded_a_version_that_is_not_kept_is_replaced() -> None:
    story = Story()
    story.publish(5)
    (replace_it,) = story.join(4)
    assert isinstance(replace_it, Replace)
    assert (replace_it.version, replace_it.incarnation) == (5, "1")
    assert story.engine() == (EnginePhase.POISONED, None, False)


def test_an_engine_that_joins_before_any_version_is_refused() -> None:
    story = Story()
    assert story.join(0) == ()
    assert story.state.phase("e") is None
    assert "before any was published" in story.state.violations()[0]


Answer = Staged | StageFailed | Committed | CommitUndone | CommitFailed
ANSWERS: list[Answer] = [
    Staged("e", 1, 1),
    StageFailed("e", 1, 1, ""),
    Committed("e", 1, 2),
    CommitUndone("e", 1, 2, ""),
    CommitFailed("e", 1, 2, ""),
]
HEARD = {
    EnginePhase.STAGING: (Staged, StageFailed),
    EnginePhase.COMMITTING: (Committed, CommitUndone, CommitFailed),
}


@pytest.mark.parametrize("phase", EnginePhase)
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_answers_are_ignored_where_the_table_says_so_and_always_with_another_order(
    phase: EnginePhase, answer: Answer
) -> None:
    story = Story()
    story.reach(phase)
    before = story.engine()
    for order in (0, 9):
        assert story.feed(replace(answer, order=order)) == ()
    assert story.feed(replace(answer, engine_id="other")) == ()
    assert story.engine() == before
    asked = story.feed(answer)
    if isinstance(answer, HEARD.get(phase, ())):
        assert (asked, story.engine()) != ((), before)
    else:
        assert (asked, story.engine()) == ((), before)
    assert story.state.violations() == ()


@pytest.mark.parametrize("phase", EnginePhase)
def test_a_lost_engine_is_forgotten_and_its_answers_with_it(phase: EnginePhase) -> None:
    story = Story()
    story.reach(phase)
    story.feed(EngineLost("e", "1"))
    assert story.engine() == (None, None, False)
    story.join(0, "2")
    before = story.engine()
    for answer in ANSWERS:
        assert story.feed(answer) == ()
    assert story.engine() == before


@pytest.mark.parametrize("phase", EnginePhase)
def test_repeated_news_about_lives_changes_nothing(phase: EnginePhase) -> None:
    story = Story()
    story.reach(phase)
    before = story.engine()
    assert story.join(0) == ()
    assert story.engine() == before
    story.feed(EngineLost("e", "1"))
    story.join(0, "2")
    again = story.engine()
    assert story.join(0) == ()
    assert story.feed(EngineLost("e", "1")) == ()
    assert story.engine() == again


def test_a_new_incarnation_replaces_the_old_one_without_a_word_of_its_loss() -> None:
    story = Story()
    story.reach(EnginePhase.POISONED)
    assert story.join(1, "2") == ()
    assert story.engine() == (EnginePhase.SERVING, 1, True)
    story.feed(EngineLost("e", "1"))
    assert story.engine() == (EnginePhase.SERVING, 1, True)


def test_a_loss_that_is_told_before_its_join_wins() -> None:
    story = Story()
    story.publish(0)
    story.feed(EngineLost("e", "1"))
    assert story.join(0, "1") == ()
    assert story.state.phase("e") is None


def test_only_the_last_versions_are_kept() -> None:
    story = Story(keep=2)
    assert [story.publish(version) for version in (1, 2, 5, 9)] == [(), (), (Retire(1),), (Retire(2),)]
    assert story.state.kept() == (5, 9)
    assert story.state.newest() == 9


def test_a_pin_keeps_a_version_until_its_last_holder_lets_go() -> None:
    story = Story(keep=1)
    story.publish(1)
    story.feed(Pinned(1, "evaluation"))
    story.feed(Pinned(1, "slow cluster"))
    story.feed(Pinned(1, "evaluation"))
    assert story.publish(2) == ()
    assert story.feed(Unpinned(1, "evaluation")) == ()
    assert story.feed(Unpinned(1, "evaluation")) == ()
    assert story.feed(Unpinned(1, "slow cluster")) == (Retire(1),)
    assert story.feed(Unpinned(1, "slow cluster")) == ()


def test_a_pin_on_a_version_that_is_gone_is_refused() -> None:
    story = Story(keep=1)
    story.publish(1)
    story.publish(2)
    assert story.feed(Pinned(1, "evaluation")) == ()
    assert story.state.violations() == ("version 1 pinned by evaluation, but it is not kept",)


@pytest.mark.parametrize("phase", EnginePhase)
def test_a_version_that_an_engine_runs_or_is_brought_to_is_not_retired(phase: EnginePhase) -> None:
    story = Story(keep=1)
    story.reach(phase)
    needed = {0, 1} if phase is not EnginePhase.SERVING else {0}
    for version in (2, 3, 4):
        story.publish(version)
        if phase is not EnginePhase.LAGGING:
            assert needed <= set(story.state.kept())
        assert 0 in story.state.kept()
    assert Retire(0) in story.feed(EngineLost("e", "1"))
    assert story.state.kept() == (4,)


@pytest.mark.parametrize(
    ("version", "fingerprint", "why"),
    [(3, "x", "after 4"), (4, "hash 4", "after 4"), (4, "x", "with another fingerprint")],
)
def test_a_version_that_does_not_rise_is_refused(version: int, fingerprint: str, why: str) -> None:
    story = Story()
    story.publish(4)
    assert story.feed(Published(version, fingerprint)) == ()
    assert why in story.state.violations()[0]
    assert story.state.kept() == (4,)


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"stage_attempts": 0}])
def test_settings_below_one_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        VersionState(**arguments)


ENGINES = ("a", "b")


class News(RuleBasedStateMachine):
    """Engines that answer truly, late, twice or not at all, beside news that nobody should believe."""

    def __init__(self) -> None:
        super().__init__()
        self.state = VersionState(keep=2, stage_attempts=2)
        self.version = 0
        self.lives = 0
        self.alive: dict[str, str] = {}
        self.orders: list[Stage | Commit] = []
        self.unanswered: dict[str, Stage | Commit] = {}
        self.staged: set[tuple[str, str, int]] = set()
        self.retired: set[int] = set()
        self.pins: set[int] = set()
        self.feed(Published(0, "hash 0"))

    def feed(self, event: VersionEvent) -> None:
        for action in self.state.step(event, 0.0):
            match action:
                case Stage() | Commit():
                    assert self.alive[action.engine_id] == action.incarnation
                    assert action.engine_id not in self.unanswered
                    assert action.version not in self.retired
                    if isinstance(action, Commit):
                        assert (action.engine_id, action.incarnation, action.version) in self.staged
                    else:
                        assert action.version == self.version
                    self.orders.append(action)
                    self.unanswered[action.engine_id] = action
                case Replace():
                    assert not self.state.may_serve(action.engine_id)
                    assert action.version in self.state.kept()
                case Retire():
                    assert action.version not in self.retired | self.pins
                    self.retired.add(action.version)

    @rule(step=st.integers(1, 3))
    def publish(self, step: int) -> None:
        self.version += step
        self.feed(Published(self.version, f"hash {self.version}"))

    @rule(engine=st.sampled_from(ENGINES), back=st.integers(0, 3))
    def join(self, engine: str, back: int) -> None:
        self.lives += 1
        self.alive[engine] = f"life {self.lives}"
        self.unanswered.pop(engine, None)
        version = max(self.state.kept()[0], self.version - back)
        self.feed(EngineJoined(engine, self.alive[engine], version))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(self.alive)))
        self.unanswered.pop(engine, None)
        self.feed(EngineLost(engine, self.alive.pop(engine)))

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data(), fails=st.booleans(), undone=st.booleans())
    def answer(self, data: st.DataObject, fails: bool, undone: bool) -> None:
        order = self.unanswered.pop(data.draw(st.sampled_from(sorted(self.unanswered))))
        if isinstance(order, Stage) and not fails:
            self.staged.add((order.engine_id, order.incarnation, order.version))
        self.feed(self.reply(order, fails, undone))

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), fails=st.booleans(), undone=st.booleans())
    def repeat_an_old_answer(self, data: st.DataObject, fails: bool, undone: bool) -> None:
        order = data.draw(st.sampled_from(self.orders))
        if order in self.unanswered.values():
            return
        before = self.looks()
        self.feed(self.reply(order, fails, undone))
        assert self.looks() == before

    @rule(life=st.integers(0, 50), engine=st.sampled_from(ENGINES), version=st.integers(0, 9))
    def repeat_old_news(self, life: int, engine: str, version: int) -> None:
        old = f"life {life}"
        if life > self.lives or old in self.alive.values():
            return
        before = self.looks()
        self.feed(EngineLost(engine, old))
        self.feed(EngineJoined(engine, old, version))
        assert self.looks() == before

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.state.kept()))
        self.pins.add(version)
        self.feed(Pinned(version, "test"))

    @rule(version=st.integers(0, 30))
    def unpin(self, version: int) -> None:
        self.pins.discard(version)
        self.feed(Unpinned(version, "test"))

    def reply(self, order: Stage | Commit, fails: bool, undone: bool = False) -> VersionEvent:
        key = (order.engine_id, order.version, order.order)
        if isinstance(order, Stage):
            return StageFailed(*key, "why") if fails else Staged(*key)
        if undone:
            return CommitUndone(*key, "why")
        return CommitFailed(*key, "why") if fails else Committed(*key)

    def looks(self) -> tuple[object, ...]:
        engines = tuple((self.state.phase(e), self.state.engine_version(e), self.state.may_serve(e)) for e in ENGINES)
        return (engines, self.state.kept(), self.state.newest())

    @invariant()
    def holds(self) -> None:
        assert self.state.newest() == self.version
        assert self.state.violations() == ()
        assert self.pins <= set(self.state.kept())
        for engine in ENGINES:
            version = self.state.engine_version(engine)
            assert version is None or version in self.state.kept()
            assert (self.state.phase(engine) is None) == (engine not in self.alive)
            busy = self.state.phase(engine) in (EnginePhase.STAGING, EnginePhase.COMMITTING)
            assert busy == (engine in self.unanswered)

    def teardown(self) -> None:
        """Whatever happened: give it a new version and true answers, and every sound engine gets there."""
        self.publish(1)
        while self.unanswered:
            _, order = self.unanswered.popitem()
            if isinstance(order, Stage):
                self.staged.add((order.engine_id, order.incarnation, order.version))
            self.feed(self.reply(order, fails=False))
        for engine in self.alive:
            if self.state.phase(engine) is not EnginePhase.POISONED:
                assert self.state.engine_version(engine) == self.version


TestNews = News.TestCase
TestNews.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
