"""Raises an alarm when a new version suddenly acts in malformed ways. Pure.

A policy that lost the action format gets no reward to find it again by, so a run that goes on only burns time.

Invariants
- Every version is *open* (too few actions seen), *good* or *bad*. Good and bad are decided once, on the first
  `min_actions` of the version or later, by its malformed fraction: bad if it is above the limit.

      state | enough actions, fraction <= limit | enough actions, fraction > limit
      open  | good                              | bad, and an alarm if an earlier version was good
      good  | good                              | good (decided)
      bad   | bad (decided)                     | bad

- One alarm per version at most. A policy that was never good raises none: it is learning the format still.
- Versions are judged each by itself, so late actions of an old version cannot hide or cause an alarm of a new one.
- At most `_KEPT` versions are remembered; actions of older ones are not counted any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import TrainingError

_KEPT = 16


@dataclass(frozen=True, slots=True)
class AlarmSettings:
    """`limit`: malformed fraction (0 to 1) above which a version is bad, judged on `min_actions` or more."""

    limit: float = 0.5
    min_actions: int = 64


@dataclass(frozen=True, slots=True)
class FormatAlarm:
    """`version` is bad; `last_good_version` is the newest earlier one that was good, with its own fraction."""

    version: int
    malformed_fraction: float
    actions: int
    last_good_version: int
    last_good_fraction: float

    def error(self) -> TrainingError:
        """The alarm as an error, for a run that must not go on."""
        return TrainingError(
            f"version {self.version} acts malformed in {self.malformed_fraction:.0%} of {self.actions} actions,"
            f" version {self.last_good_version} did in {self.last_good_fraction:.0%}",
            to_do=f"go back to version {self.last_good_version} and lower the learning rate or warm up longer",
        )


@dataclass(slots=True)
class _Tally:
    actions: int = 0
    malformed: int = 0
    good: bool | None = None

    @property
    def fraction(self) -> float:
        return self.malformed / self.actions


class MalformedAlarm:
    """Feed it the actions of each version; it answers with an alarm when one is due."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._tallies: dict[int, _Tally] = {}

    def step(self, version: int, actions: int, malformed: int) -> FormatAlarm | None:
        """Count `actions` more of `version`, `malformed` of them unreadable.

        Raises ValueError if that cannot be (negative, or more malformed than actions).
        """
        if not 0 <= malformed <= actions:
            raise ValueError(f"{malformed} malformed of {actions} actions")
        if version not in self._tallies and len(self._tallies) >= _KEPT:
            oldest = min(self._tallies)
            if version < oldest:
                return None
            del self._tallies[oldest]
        tally = self._tallies.setdefault(version, _Tally())
        tally.actions += actions
        tally.malformed += malformed
        if tally.good is not None or tally.actions < max(1, self._settings.min_actions):
            return None
        tally.good = tally.fraction <= self._settings.limit
        return None if tally.good else self._alarm(version, tally)

    def _alarm(self, version: int, tally: _Tally) -> FormatAlarm | None:
        good = [earlier for earlier, other in self._tallies.items() if earlier < version and other.good]
        if not good:
            return None
        last = max(good)
        return FormatAlarm(version, tally.fraction, tally.actions, last, self._tallies[last].fraction)
