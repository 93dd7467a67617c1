from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import TrainingError
from rose.trainer.alarm import AlarmSettings, FormatAlarm, MalformedAlarm

SETTINGS = AlarmSettings(limit=0.5, min_actions=10)


def test_a_collapse_after_a_good_version_raises_the_alarm_once() -> None:
    alarm = MalformedAlarm(SETTINGS)
    assert alarm.step(3, 20, 1) is None
    assert alarm.step(4, 9, 9) is None  # too few to judge
    raised = alarm.step(4, 1, 0)
    assert raised == FormatAlarm(4, 0.9, 10, 3, 0.05)
    assert alarm.step(4, 50, 50) is None


def test_the_alarm_as_an_error_says_version_fractions_and_the_last_good_one() -> None:
    error = FormatAlarm(4, 0.9, 10, 3, 0.05).error()
    assert isinstance(error, TrainingError)
    assert "version 4 acts malformed in 90% of 10 actions, version 3 did in 5%" in str(error)
    assert "go back to version 3" in str(error)


def test_exactly_the_limit_is_good() -> None:
    alarm = MalformedAlarm(SETTINGS)
    alarm.step(1, 10, 0)
    assert alarm.step(2, 10, 5) is None
    assert alarm.step(3, 10, 6) is not None


def test_a_policy_that_was_never_good_raises_none() -> None:
    alarm = MalformedAlarm(SETTINGS)
    assert [alarm.step(version, 10, 10) for version in range(5)] == [None] * 5


def test_the_last_good_version_is_the_newest_earlier_one_that_was_good() -> None:
    alarm = MalformedAlarm(SETTINGS)
    for version, malformed in ((1, 0), (2, 1), (3, 10), (5, 0)):
        alarm.step(version, 10, malformed)
    raised = alarm.step(4, 10, 10)
    assert raised is not None
    assert raised.last_good_version == 2


def test_late_actions_of_an_old_version_change_no_verdict() -> None:
    alarm = MalformedAlarm(SETTINGS)
    alarm.step(1, 10, 0)
    assert alarm.step(1, 100, 100) is None
    raised = alarm.step(2, 10, 10)
    assert raised is not None
    assert raised.last_good_version == 1


def test_old_versions_are_forgotten_but_not_the_recent_good_ones() -> None:
    alarm = MalformedAlarm(SETTINGS)
    for version in range(100):
        assert alarm.step(version, 10, 0) is None
    assert alarm.step(0, 10, 10) is None
    raised = alarm.step(100, 10, 10)
    assert raised is not None
    assert raised.last_good_version == 99


@pytest.mark.parametrize(("actions", "malformed"), [(1, 2), (1, -1), (-1, 0)])
def test_impossible_counts_are_refused(actions: int, malformed: int) -> None:
    with pytest.raises(ValueError, match="malformed"):
        MalformedAlarm(SETTINGS).step(1, actions, malformed)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 15), st.integers(0, 15)), max_size=40))
def test_an_alarm_is_true_and_comes_once_per_version(events: list[tuple[int, int, int]]) -> None:
    alarm = MalformedAlarm(SETTINGS)
    seen: dict[int, list[int]] = {}
    alarmed: set[int] = set()
    for version, more, of_them in events:
        actions, malformed = max(more, of_them), of_them
        totals = seen.setdefault(version, [0, 0])
        totals[0] += actions
        totals[1] += malformed
        raised = alarm.step(version, actions, malformed)
        if raised is not None:
            assert raised.version == version
            assert raised.version not in alarmed
            assert raised.last_good_version < version
            assert raised.actions == totals[0] >= SETTINGS.min_actions
            assert raised.malformed_fraction == totals[1] / totals[0] > SETTINGS.limit
            alarmed.add(version)
